"""What a server keeps beside its log: finished answers with their media, uploaded files, batches."""
