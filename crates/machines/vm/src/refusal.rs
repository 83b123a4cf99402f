//! Refuses QEMU options that do not work with a paged guest, and says why.
//!
//! A page of the guest is evicted in this order: write-protect it in QEMU, copy it, write it to a
//! donor, punch it out of the memory file. That is sound as long as every access to guest memory
//! goes through QEMU's mapping, where it faults. Three kinds of access do not: DMA into pinned
//! pages, mappings of the same memory in another process, and the processor's own encryption. They
//! lose data silently, so they are refused before the VM starts.

use crate::option::OptionValue;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Reason for a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// VFIO, vDPA, RDMA: a device reads and writes guest memory by its physical address.
    PinnedByDevice,
    /// `O_DIRECT`: the kernel pins guest pages for each transfer.
    DirectIo,
    /// vhost-user, ivshmem: another process maps guest memory too.
    MappedElsewhere,
    /// hugetlbfs: a single page of 4 KiB cannot be evicted.
    HugePages,
    /// All memory is touched at the start.
    Preallocated,
    /// `mlock`.
    Locked,
    /// A private mapping: guest writes do not reach the memory file.
    Private,
    /// A file on a disk, or a device: punching holes would destroy it.
    FileOnDisk,
    /// SEV, TDX, SGX: the host does not read the bytes that the guest wrote.
    Encrypted,
    /// `-daemonize`: QEMU would leave the process that Hecaton follows.
    Detached,
}

impl Reason {
    /// The reason and the way out, as the end of a sentence.
    pub fn text(self) -> &'static str {
        match self {
            Reason::PinnedByDevice => {
                "the device reads and writes guest memory without page faults, so no page of it \
                 may leave the host; use a virtio device, or run this machine on plain memory"
            }
            Reason::DirectIo => {
                "direct I/O writes into guest pages by their physical address, also when the page \
                 has left in the meantime; use cache=writeback with aio=threads or aio=io_uring"
            }
            Reason::MappedElsewhere => {
                "another process maps guest memory, and would find zeros where a page has left; \
                 use a device that QEMU itself emulates, or vhost in the kernel"
            }
            Reason::HugePages => {
                "huge pages cannot be taken out in parts; leave the huge pages out"
            }
            Reason::Preallocated => {
                "it fills all of the memory at the start; leave it out, pages come when they are \
                 touched"
            }
            Reason::Locked => "locked memory cannot leave the host; leave it out",
            Reason::Private => {
                "a private mapping cannot be paged by its memory file; write share=on"
            }
            Reason::FileOnDisk => {
                "holes would be punched into a file that is kept; use memory-backend-memfd"
            }
            Reason::Encrypted => {
                "encrypted guest memory cannot be moved by the host; run this machine on plain \
                 memory"
            }
            Reason::Detached => {
                "the machine is followed through its process; leave it out, and put the command \
                 into the background instead"
            }
        }
    }
}

/// One refused option or device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{subject}: {}", reason.text())]
pub struct Refusal {
    /// As the user wrote it.
    pub subject: String,
    /// Reason for the refusal.
    pub reason: Reason,
}

impl Refusal {
    /// Refuses `subject` for `reason`.
    pub fn new(subject: impl fmt::Display, reason: Reason) -> Refusal {
        Refusal { subject: subject.to_string(), reason }
    }
}

/// Checks a device (`-device`, or QOM type of an existing one) by its driver's name.
pub fn of_device(driver: &str) -> Option<Reason> {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| driver.starts_with(prefix));
    if starts(&["vfio-", "vhost-vdpa", "pvrdma", "iommufd"]) {
        Some(Reason::PinnedByDevice)
    } else if starts(&["vhost-user-", "ivshmem", "x-pci-proxy-dev"]) {
        Some(Reason::MappedElsewhere)
    } else if starts(&["scsi-generic", "scsi-block", "vhost-scsi"]) {
        // SG_IO, and the kernel's vhost-scsi, map guest pages into the requests themselves.
        Some(Reason::DirectIo)
    } else {
        None
    }
}

/// Checks a device by its driver and properties.
pub fn of_device_option(device: &OptionValue) -> Option<Reason> {
    let driver = device.get("driver")?;
    let gpu = driver.starts_with("virtio-gpu") || driver.starts_with("virtio-vga");
    // udmabuf pins the buffers that the guest draws into.
    if gpu && device.is_on("blob") {
        return Some(Reason::PinnedByDevice);
    }
    of_device(driver)
}

/// Checks an object (`-object`) that is no memory backend, by its type.
pub fn of_object(kind: &str) -> Option<Reason> {
    match kind {
        "iommufd" => Some(Reason::PinnedByDevice),
        "sev-guest" | "sev-snp-guest" | "tdx-guest" | "pef-guest" | "s390-pv-guest" => {
            Some(Reason::Encrypted)
        }
        // Parts of the VM in other processes.
        "x-remote-object" | "x-vfio-user-server" => Some(Reason::MappedElsewhere),
        _ => None,
    }
}

/// Checks a network back-end (`-netdev`, `-nic`) by its type.
pub fn of_network(kind: &str) -> Option<Reason> {
    match kind {
        "vhost-vdpa" => Some(Reason::PinnedByDevice),
        "vhost-user" => Some(Reason::MappedElsewhere),
        _ => None,
    }
}

/// Checks a drive (`-drive`) or block node (`-blockdev`).
pub fn of_block(option: &OptionValue) -> Option<Reason> {
    let direct = matches!(option.get("cache"), Some("none" | "directsync"))
        || option.is_on("cache.direct")
        || option.get("aio") == Some("native");
    let driver_of = |key: &str| key == "driver" || key.ends_with(".driver");
    // Layers of a block node have nested keys: `file.driver=nvme`.
    let nested_direct = option.parts().any(|(key, value)| {
        (key.ends_with(".cache.direct") && value == "on")
            || (key.ends_with(".aio") && value == "native")
    });
    let pins = option.parts().any(|(key, value)| {
        driver_of(key)
            && matches!(
                value,
                "nvme" | "nvme-io_uring" | "virtio-blk-vfio-pci" | "virtio-blk-vhost-vdpa"
            )
            || (key == "file" || key == "filename") && value.starts_with("nvme://")
    });
    let elsewhere =
        option.parts().any(|(key, value)| driver_of(key) && value == "virtio-blk-vhost-user");
    if pins {
        Some(Reason::PinnedByDevice)
    } else if elsewhere {
        Some(Reason::MappedElsewhere)
    } else if direct || nested_direct {
        Some(Reason::DirectIo)
    } else {
        None
    }
}

/// Checks a memory backend (`-object memory-backend-…`, or the same of `object-add`).
pub fn of_backend(backend: &OptionValue) -> Option<Reason> {
    let kind = backend.get("qom-type").unwrap_or_default();
    let shared_by_itself = matches!(kind, "memory-backend-memfd" | "memory-backend-shm");
    let file = matches!(kind, "memory-backend-file");
    if kind == "memory-backend-epc" {
        return Some(Reason::Encrypted);
    }
    if backend.is_on("hugetlb") || backend.get("hugetlbsize").is_some() {
        return Some(Reason::HugePages);
    }
    if backend.is_on("prealloc") {
        return Some(Reason::Preallocated);
    }
    if file && backend.get("mem-path").is_some_and(|path| path.contains("huge")) {
        return Some(Reason::HugePages);
    }
    // The only path that the pager takes is that of a memfd that a node has made.
    if file && !backend.get("mem-path").is_some_and(is_descriptor_path) {
        return Some(Reason::FileOnDisk);
    }
    if backend.is_on("pmem") || backend.is_on("readonly") || backend.is_on("rom") {
        return Some(Reason::FileOnDisk);
    }
    let share = backend.get("share");
    let shared = match share {
        None => shared_by_itself,
        Some(_) => backend.is_on("share"),
    };
    (!shared).then_some(Reason::Private)
}

/// Whether `path` is `/proc/PID/fd/N`.
fn is_descriptor_path(path: &str) -> bool {
    let mut parts = path.split('/').skip(1);
    parts.next() == Some("proc") && parts.nth(1) == Some("fd")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(text: &str) -> OptionValue {
        OptionValue::parse(text, "qom-type").expect("read")
    }

    #[test]
    fn devices_that_pin_or_share_memory_are_refused() {
        for (driver, reason) in [
            ("vfio-pci", Some(Reason::PinnedByDevice)),
            ("vfio-pci-nohotplug", Some(Reason::PinnedByDevice)),
            ("vhost-vdpa-device-pci", Some(Reason::PinnedByDevice)),
            ("vhost-user-blk-pci", Some(Reason::MappedElsewhere)),
            ("vhost-user-fs-pci", Some(Reason::MappedElsewhere)),
            ("ivshmem-plain", Some(Reason::MappedElsewhere)),
            ("virtio-net-pci", None),
            ("vhost-scsi-pci", Some(Reason::DirectIo)),
            ("scsi-block", Some(Reason::DirectIo)),
            ("scsi-hd", None),
            ("vhost-vsock-pci", None),
            ("virtio-mem-pci", None),
        ] {
            assert_eq!(of_device(driver), reason, "{driver}");
        }
    }

    #[test]
    fn a_gpu_that_pins_what_is_drawn_is_refused() {
        let of = |text| of_device_option(&OptionValue::parse(text, "driver").expect("read"));
        assert_eq!(of("virtio-gpu-pci,blob=on"), Some(Reason::PinnedByDevice));
        assert_eq!(of("virtio-vga"), None);
        assert_eq!(of("virtio-gpu-pci,blob=off"), None);
    }

    #[test]
    fn direct_io_is_refused_in_all_its_spellings() {
        for text in [
            "file=a,cache=none",
            "file=a,cache=directsync,aio=threads",
            "file=a,cache.direct=on",
            "file=a,aio=native",
            r#"{"driver":"file","filename":"a","cache":{"direct":true}}"#,
            r#"{"driver":"raw","file":{"driver":"file","cache":{"direct":true}}}"#,
            "driver=qcow2,file.driver=file,file.filename=a,file.aio=native",
        ] {
            assert_eq!(of_block(&option(text)), Some(Reason::DirectIo), "{text}");
        }
        for text in ["file=a", "file=a,cache=unsafe,aio=io_uring", "driver=null-co,size=1G"] {
            assert_eq!(of_block(&option(text)), None, "{text}");
        }
        for text in ["file=nvme://0000:00:01.0/1", r#"{"driver":"raw","file":{"driver":"nvme"}}"#] {
            assert_eq!(of_block(&option(text)), Some(Reason::PinnedByDevice), "{text}");
        }
    }

    #[test]
    fn backends_are_shared_memory_in_small_pages_or_refused() {
        for (text, reason) in [
            ("memory-backend-memfd,id=a,size=1G", None),
            ("memory-backend-memfd,id=a,size=1G,share=off", Some(Reason::Private)),
            ("memory-backend-memfd,id=a,size=1G,hugetlb=on", Some(Reason::HugePages)),
            ("memory-backend-memfd,id=a,size=1G,prealloc=on", Some(Reason::Preallocated)),
            ("memory-backend-file,id=a,mem-path=/proc/1/fd/7,share=on", None),
            ("memory-backend-file,id=a,mem-path=/proc/1/fd/7", Some(Reason::Private)),
            ("memory-backend-file,id=a,mem-path=/dev/hugepages,share=on", Some(Reason::HugePages)),
            ("memory-backend-file,id=a,mem-path=/srv/ram,share=on", Some(Reason::FileOnDisk)),
            ("memory-backend-file,id=a,mem-path=/dev/dax0.0,share=on", Some(Reason::FileOnDisk)),
            ("memory-backend-ram,id=a,size=1G", Some(Reason::Private)),
            ("memory-backend-epc,id=a,size=1M", Some(Reason::Encrypted)),
        ] {
            assert_eq!(of_backend(&option(text)), reason, "{text}");
        }
    }

    #[test]
    fn a_refusal_says_what_why_and_the_way_out() {
        let text = Refusal::new("-device vfio-pci", Reason::PinnedByDevice).to_string();
        assert!(text.starts_with("-device vfio-pci: ") && text.contains("virtio"), "{text}");
    }
}
