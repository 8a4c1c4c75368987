"""`tftpu launch gke`: JobSets on Kubernetes Engine."""
