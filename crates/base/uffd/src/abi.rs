//! Numbers and structures of `<linux/userfaultfd.h>`, checked for size at compile time.
//!
//! Taken from Linux 6.18. [`UFFDIO_API`] returns the features of the running kernel; 6.1 lacks MOVE
//! (6.8).
#![allow(missing_docs, reason = "the names are the kernel's; its manual page documents them")]

use std::mem::size_of;

pub const UFFD_API: u64 = 0xAA;

pub const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
pub const UFFD_FEATURE_EVENT_REMAP: u64 = 1 << 2;
pub const UFFD_FEATURE_EVENT_REMOVE: u64 = 1 << 3;
pub const UFFD_FEATURE_MISSING_SHMEM: u64 = 1 << 5;
pub const UFFD_FEATURE_EVENT_UNMAP: u64 = 1 << 6;
pub const UFFD_FEATURE_THREAD_ID: u64 = 1 << 8;
pub const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
pub const UFFD_FEATURE_MOVE: u64 = 1 << 16;

/// Features that a pager needs of a program's userfaultfd. EVENT_FORK is not among them, because it
/// takes CAP_SYS_PTRACE: `libhecaton.so` reports forks.
pub const PAGER_FEATURES: u64 = UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | UFFD_FEATURE_EVENT_REMAP
    | UFFD_FEATURE_EVENT_REMOVE
    | UFFD_FEATURE_EVENT_UNMAP
    | UFFD_FEATURE_THREAD_ID;

/// Features that a pager needs of a hypervisor's userfaultfd. The newest is write protection of
/// shared memory (Linux 5.19). `fork` is not followed: hypervisors keep guest RAM from their
/// children (`MADV_DONTFORK`). Moves are followed: otherwise moved memory would lose its
/// registration, and read as zeros.
pub const GUEST_RAM_FEATURES: u64 = UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | UFFD_FEATURE_MISSING_SHMEM
    | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | UFFD_FEATURE_EVENT_REMAP
    | UFFD_FEATURE_EVENT_REMOVE
    | UFFD_FEATURE_EVENT_UNMAP
    | UFFD_FEATURE_THREAD_ID;

pub const UFFDIO_API: u64 = 0xC018_AA3F;
pub const UFFDIO_REGISTER: u64 = 0xC020_AA00;
pub const UFFDIO_UNREGISTER: u64 = 0x8010_AA01;
pub const UFFDIO_WAKE: u64 = 0x8010_AA02;
pub const UFFDIO_COPY: u64 = 0xC028_AA03;
pub const UFFDIO_ZEROPAGE: u64 = 0xC020_AA04;
pub const UFFDIO_MOVE: u64 = 0xC028_AA05;
pub const UFFDIO_WRITEPROTECT: u64 = 0xC018_AA06;

/// `_IO(0xAA, 0x00)` on `/dev/userfaultfd`: a new userfaultfd, with no privilege but the device's.
pub const USERFAULTFD_IOC_NEW: u64 = 0xAA00;

pub const UFFDIO_REGISTER_MODE_MISSING: u64 = 1 << 0;
pub const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
pub const UFFDIO_COPY_MODE_WP: u64 = 1 << 1;
pub const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;
pub const UFFDIO_MOVE_MODE_DONTWAKE: u64 = 1 << 0;
pub const UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES: u64 = 1 << 1;

pub const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
pub const UFFD_EVENT_REMAP: u8 = 0x14;
pub const UFFD_EVENT_REMOVE: u8 = 0x15;
pub const UFFD_EVENT_UNMAP: u8 = 0x16;

pub const UFFD_PAGEFAULT_FLAG_WRITE: u64 = 1 << 0;
pub const UFFD_PAGEFAULT_FLAG_WP: u64 = 1 << 1;

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct UffdioApi {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct UffdioRange {
    pub start: u64,
    pub len: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct UffdioRegister {
    pub range: UffdioRange,
    pub mode: u64,
    pub ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct UffdioCopy {
    pub dst: u64,
    pub src: u64,
    pub len: u64,
    pub mode: u64,
    pub copy: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct UffdioZeropage {
    pub range: UffdioRange,
    pub mode: u64,
    pub zeropage: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct UffdioWriteprotect {
    pub range: UffdioRange,
    pub mode: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct UffdioMove {
    pub dst: u64,
    pub src: u64,
    pub len: u64,
    pub mode: u64,
    pub moved: i64,
}

/// One message: the event, and three words whose meaning depends on it.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct UffdMsg {
    pub event: u8,
    pub reserved: [u8; 7],
    /// pagefault: flags; remap: from; others: start.
    pub arg0: u64,
    /// pagefault: address; remap: to; others: end.
    pub arg1: u64,
    /// pagefault: thread id in the low half; remap: length.
    pub arg2: u64,
}

const _: () = assert!(size_of::<UffdMsg>() == 32);
const _: () = assert!(size_of::<UffdioApi>() == (UFFDIO_API as usize >> 16) & 0x3FFF);
const _: () = assert!(size_of::<UffdioRegister>() == (UFFDIO_REGISTER as usize >> 16) & 0x3FFF);
const _: () = assert!(size_of::<UffdioRange>() == (UFFDIO_WAKE as usize >> 16) & 0x3FFF);
const _: () = assert!(size_of::<UffdioCopy>() == (UFFDIO_COPY as usize >> 16) & 0x3FFF);
const _: () = assert!(size_of::<UffdioZeropage>() == (UFFDIO_ZEROPAGE as usize >> 16) & 0x3FFF);
const _: () = assert!(size_of::<UffdioMove>() == (UFFDIO_MOVE as usize >> 16) & 0x3FFF);
const _: () =
    assert!(size_of::<UffdioWriteprotect>() == (UFFDIO_WRITEPROTECT as usize >> 16) & 0x3FFF);
