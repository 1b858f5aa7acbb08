"""Groups of commands in `isles --help`, in the order of a user's day."""

from cyclopts import Group

START = Group("Start", sort_key=1)
WATCH = Group("Watch and stop", sort_key=2)
RESULTS = Group("Results", sort_key=3)
CLUSTERS = Group("Several clusters", sort_key=4)
TOOLS = Group("Tools", sort_key=5)
