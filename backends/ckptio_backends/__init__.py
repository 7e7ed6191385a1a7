"""The drivers that come with ckptio; each module is one, and is imported only when needed."""
