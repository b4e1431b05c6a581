"""Operations of the trainer's own, each with a plain form in torch that it is held to."""
