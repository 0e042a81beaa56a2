"""What a training run keeps: when it saves, what stays, where it goes on."""
