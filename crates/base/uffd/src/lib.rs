//! userfaultfd: the kernel's interface, and how a program hands one to its pager.
//!
//! - [`abi`]: the kernel's numbers and structures, and nothing else.
//! - [`sys`]: wraps the ioctls in functions that return `Result`.
//! - [`handover`]: the protocol between `libhecaton.so` and the pager for a program.
//! - [`guest_ram`]: their protocol for a hypervisor.
//! - [`bare`]: the launcher's message to the library in a program that has no glibc.
//!
//! The `userfaultfd` crate was considered: it lacks MOVE and the write-protected copy, and the
//! preload library needs all of it without allocation.

pub mod abi;
pub mod bare;
pub mod guest_ram;
pub mod handover;
pub mod sys;

pub use sys::{Errno, Uffd};
