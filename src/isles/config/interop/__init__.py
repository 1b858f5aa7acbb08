"""Files of other tools: DeepSpeed's JSON is read, compared and written, accelerate's is written."""
