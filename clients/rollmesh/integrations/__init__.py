"""Trainers that know nothing of rollmesh: verl, TransferQueue, TRL. Import the module you need."""
