"""What a link can do: one small interface (`base.Port`) and its backends `netem`, `bpf` and `fake`."""
