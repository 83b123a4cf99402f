//! Guest RAM: memory of a hypervisor, handed over by it or by `libhecaton.so` in it.
//!
//! It differs from a program's memory in who can take pages away. A thread in the program takes a
//! program's private memory. A hypervisor's memory is shared: a memory file that it maps and that
//! the pager holds too. So the pager itself punches pages out of the file, and no thread of ours is
//! in the hypervisor. Both kinds share the code for the tables, the eviction order, and
//! prefetching. The seam is [`Ram`] here, and two questions of
//! [`crate::programs::address_space::AddressSpace`]: can a page be taken, and is it there.
//!
//! Memory that a hypervisor hands over without its file (Firecracker's is private) can be brought
//! in, and is given up when the hypervisor frees it, but nothing can be taken away from it.
//!
//! | module | what it is about |
//! |---|---|
//! | [`ram`], [`region`] | all guest RAM of a hypervisor; one region of it |
//! | [`span`] | which regions can be paged |
//! | [`memory_file`] | what is asked and done to a memory file |
//! | [`handover`] | the hand-over by `libhecaton.so` |
//! | [`firecracker`], [`image`] | Firecracker's own hand-over; the snapshot that it restores |
//! | [`evict`] | taking pages away |
//! | [`detach`] | a machine that leaves while it runs |
//! | [`event`] | what the hypervisor does to its memory: free, unplug |

pub(crate) mod detach;
pub(crate) mod event;
pub(crate) mod evict;
pub(crate) mod firecracker;
pub(crate) mod handover;
pub(crate) mod image;
pub(crate) mod memory_file;
mod ram;
mod region;
pub(crate) mod span;

pub(crate) use ram::{FilePlace, HeldFile, Ram};
