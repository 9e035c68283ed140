"""A local server for the debugger's page in a browser (`mmengine log debug --web`)."""
