"""One model over several clusters that average over slow links."""
