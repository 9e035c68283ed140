"""What every route shares: errors, authentication, admission, body limits, pagination, and HTTP metrics."""
