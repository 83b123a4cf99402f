//! userfaultfd: the kernel's interface, and how a program hands one to its pager.
//!
//! [`abi`] holds the kernel's numbers and structures and nothing else; [`sys`] wraps the ioctls in
//! functions that return `Result`; [`handover`] is what `libhecaton.so` and the pager say to each
//! other about a program, [`guest_ram`] what they say about a hypervisor, [`bare`] what the
//! launcher says to the library in a program that has no glibc. The `userfaultfd` crate was
//! considered: it lacks MOVE and the write-protected copy, and the preload library needs all of it
//! without allocation.

pub mod abi;
pub mod bare;
pub mod guest_ram;
pub mod handover;
pub mod sys;

pub use sys::{Errno, Uffd};
