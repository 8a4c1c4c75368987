"""`tftpu launch vertex` and its relatives: jobs, endpoints, pipelines and searches of Vertex AI."""
