"""Messages of rows: their forms, and the prompts of pairs without one."""
