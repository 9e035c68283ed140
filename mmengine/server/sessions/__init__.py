"""/v1/sessions: requests that grow while their input arrives."""
