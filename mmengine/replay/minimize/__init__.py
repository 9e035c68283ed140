"""From a log that fails to the smallest one that fails alike."""
