"""Engine gloo: clusters that reach one another average directly."""
