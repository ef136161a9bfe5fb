"""The other side of a conversation: what answers the policy between its turns."""
