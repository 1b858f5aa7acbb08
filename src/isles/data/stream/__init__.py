"""Sources that are streamed: `segment.py` prepares segments, one folder of tokens after another;
`samples.py` reads them, one ahead, and forgets them. Open `samples.py` first."""
