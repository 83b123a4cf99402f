//! The `hecaton` command.
fn main() {}
