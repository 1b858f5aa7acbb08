"""Sources that are streamed: `segments.py` prepares segments, one folder of tokens after another;
`samples.py` reads them, one ahead, and forgets them. Open `samples.py` first."""
