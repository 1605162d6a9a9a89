"""One file an operator: its docstring is the design record; kernel, plan and public function follow."""
