"""The side process of a cluster: beside rank 0, it talks with the rendezvous and the others."""
