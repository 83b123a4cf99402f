//! The host's huge pages of 2 MiB: how many are set aside, and how to have more.
//!
//! They are looked at before memory is made of them: `memfd_create` and `mmap` succeed without a
//! single huge page, and the failure would come with the first write, as SIGBUS.

use crate::host::memfd::{HUGE_PAGE_BYTES, MemoryError};
use crate::host::numa::SYSFS_NODES;
use std::path::{Path, PathBuf};

/// Where the kernel counts them for the whole host.
const SYSFS_HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// How many huge pages there are, of the whole host or of one NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// Set aside, in use or not.
    pub set_aside: u64,
    /// Set-aside pages that are neither in use nor reserved.
    pub free: u64,
}

impl HugePages {
    /// Those of `node`, or of the whole host; none where the kernel does not know huge pages.
    pub fn here(node: Option<u32>) -> HugePages {
        HugePages::read(&directory(node))
    }

    fn read(directory: &Path) -> HugePages {
        let count = |file: &str| {
            let text = std::fs::read_to_string(directory.join(file)).ok();
            text.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        // The kernel counts reserved pages for the host only; a node has no such file.
        let free = count("free_hugepages").saturating_sub(count("resv_hugepages"));
        HugePages { set_aside: count("nr_hugepages"), free }
    }
}

/// Refuses memory that takes more huge pages than are free.
pub fn check(wanted_bytes: u64, node: Option<u32>) -> Result<(), MemoryError> {
    let pages = HugePages::here(node);
    let wanted = wanted_bytes.div_ceil(HUGE_PAGE_BYTES);
    if wanted > pages.free {
        return Err(MemoryError::NoHugePages {
            wanted,
            free: pages.free,
            way_out: way_out(pages.set_aside.saturating_add(wanted - pages.free), node),
        });
    }
    Ok(())
}

/// The command that has the kernel set `pages` aside.
fn way_out(pages: u64, node: Option<u32>) -> String {
    match node {
        None => format!("sysctl vm.nr_hugepages={pages}"),
        Some(_) => format!("echo {pages} > {}/nr_hugepages", directory(node).display()),
    }
}

fn directory(node: Option<u32>) -> PathBuf {
    match node {
        None => SYSFS_HUGE_PAGES.into(),
        Some(node) => Path::new(SYSFS_NODES).join(format!("node{node}/hugepages/hugepages-2048kB")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_promised_is_not_free() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(HugePages::read(directory.path()), HugePages { set_aside: 0, free: 0 });
        for (file, count) in [("nr_hugepages", "9\n"), ("free_hugepages", "7\n")] {
            std::fs::write(directory.path().join(file), count).unwrap();
        }
        assert_eq!(HugePages::read(directory.path()), HugePages { set_aside: 9, free: 7 });
        std::fs::write(directory.path().join("resv_hugepages"), "3\n").unwrap();
        assert_eq!(HugePages::read(directory.path()), HugePages { set_aside: 9, free: 4 });
    }

    #[test]
    fn says_how_to_set_more_aside() {
        let more_than_any_host = 1 << 50;
        let message = check(more_than_any_host, None).unwrap_err().to_string();
        assert!(message.contains("536870912 huge pages"), "{message}");
        assert!(message.contains("`sysctl vm.nr_hugepages=5"), "{message}");
        let message = check(more_than_any_host, Some(7)).unwrap_err().to_string();
        assert!(message.contains("node7/hugepages/hugepages-2048kB/nr_hugepages"), "{message}");
    }
}
