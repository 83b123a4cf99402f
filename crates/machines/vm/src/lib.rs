//! Virtual machines whose RAM is in the pool.
//!
//! Neither QEMU nor the guest is changed. What is changed is how QEMU is told to make the guest's
//! RAM: as shared memory in a memfd, which `libhecaton.so` recognises and hands to the pager
//! ([`guest_ram`] for a command line, [`domain`] for libvirt). What would have guest memory read or
//! written past the pager is refused beforehand, with the reason ([`refusal`]). A machine that
//! runs is stopped and watched through its monitor ([`qmp`]), and is made larger and smaller through
//! its virtio-mem devices ([`memory_device`]) or its balloon ([`balloon`]), which one that its host's agent has admitted is started with
//! ([`create`]); the manager inside it is told before that ([`guest_port`]). libvirt's domains are asked through [`virsh`].
//!
//! All but [`qmp`], [`virsh`], [`memory_device`] and [`balloon`] is pure: text in, text out.

pub mod balloon;
pub mod create;
pub mod domain;
pub mod guest_port;
pub mod guest_ram;
pub mod memory_device;
pub mod option;
pub mod qmp;
pub mod refusal;
pub mod virsh;
pub mod words;

/// The id of the memory backend that a machine is given when its own RAM has none.
pub const BACKEND_ID: &str = "hecaton-ram";
