"""What the front costs, operation by operation: each module measures one kind of work on a directory."""
