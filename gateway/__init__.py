"""The gateway: its own process, through which agents of any framework reach the engines and are recorded."""
