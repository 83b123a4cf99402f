//! Drives the real `hecaton` command: what it refuses, and clusters on this machine.

mod cluster;
mod common;
mod memory;
mod restart;
mod usage;
