"""The joint graph of training, before it is partitioned into forward and backward."""
