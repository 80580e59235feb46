"""How ranks meet and talk: backend choice, rendezvous, addresses."""
