"""From a path to a model that answers: fetching, loading, converting, generating."""
