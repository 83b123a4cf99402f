//! Virtual machines whose RAM is in the pool.
//!
//! Neither QEMU nor the guest is changed. [`guest_ram`] (for a command line) and [`domain`] (for
//! libvirt) make QEMU place the guest's RAM in a shared memfd. `libhecaton.so` recognises the memfd
//! and hands it to the pager. [`refusal`] refuses, with the reason, options that would read or
//! write guest memory past the pager.
//!
//! The monitor ([`qmp`]) stops and watches a running machine. Virtio-mem devices
//! ([`memory_device`]) or a balloon ([`balloon`]) grow and shrink it. [`create`] adds them to the
//! command line of a machine that its host's agent has admitted. [`guest_port`] tells the manager
//! inside beforehand. [`virsh`] asks about libvirt's domains.
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
