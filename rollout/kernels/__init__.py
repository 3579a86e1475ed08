"""What a step computes besides the model: each kernel beside the plain torch that defines it."""
