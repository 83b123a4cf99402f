//! The host's NUMA nodes, and memory bound to one of them.
//!
//! Read from sysfs and not through libnuma: three small files tell all that is needed, and a test
//! can write them.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;

/// Where the kernel describes its nodes.
pub const SYSFS_NODES: &str = "/sys/devices/system/node";

/// Highest node number that can be bound to.
const MAX_NODES: usize = 1024;

/// A NUMA node that has memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// The kernel's number for it.
    pub node: u32,
    /// Its memory.
    pub total_bytes: u64,
    /// Unused memory at the time of the call.
    pub free_bytes: u64,
}

/// The nodes that have memory, by rising number; none if the kernel knows no NUMA. `root` is
/// [`SYSFS_NODES`] on a real host.
pub fn nodes(root: &Path) -> io::Result<Vec<NumaNode>> {
    let list = match std::fs::read_to_string(root.join("has_memory")) {
        Ok(list) => list,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let numbers = parse_list(list.trim()).ok_or_else(|| malformed(root, "has_memory"))?;
    numbers.into_iter().map(|node| read_node(root, node)).collect()
}

fn read_node(root: &Path, node: u32) -> io::Result<NumaNode> {
    let file = format!("node{node}/meminfo");
    let text = std::fs::read_to_string(root.join(&file))?;
    // Lines such as "Node 0 MemTotal:       24683560 kB".
    let field = |name: &str| {
        let line = text.lines().find(|line| line.split_whitespace().nth(2) == Some(name))?;
        let kib: u64 = line.split_whitespace().nth(3)?.parse().ok()?;
        kib.checked_mul(1024)
    };
    match (field("MemTotal:"), field("MemFree:")) {
        (Some(total_bytes), Some(free_bytes)) => Ok(NumaNode { node, total_bytes, free_bytes }),
        _ => Err(malformed(root, &file)),
    }
}

/// The kernel's list format: "0-2,5".
fn parse_list(list: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in list.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last as usize >= MAX_NODES {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

fn malformed(root: &Path, file: &str) -> io::Error {
    let path = root.join(file);
    io::Error::new(io::ErrorKind::InvalidData, format!("cannot make sense of {}", path.display()))
}

const WORD_BITS: usize = libc::c_ulong::BITS as usize;

/// One bit for each node.
type NodeMask = [libc::c_ulong; MAX_NODES / WORD_BITS];

fn mask_of(node: u32) -> io::Result<NodeMask> {
    let mut mask: NodeMask = [0; MAX_NODES / WORD_BITS];
    let word = mask.get_mut(node as usize / WORD_BITS).ok_or(io::ErrorKind::InvalidInput)?;
    *word = 1 << (node as usize % WORD_BITS);
    Ok(mask)
}

/// Has this thread, what it forks, and the program that it becomes take their memory from one node.
pub fn bind_thread(node: u32) -> io::Result<()> {
    let mask = mask_of(node)?;
    // SAFETY: the mask is read for MAX_NODES bits, which it has. The kernel counts one bit less
    // than it is told (mbind(2), notes). A policy changes no contents.
    let bound = unsafe {
        libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, mask.as_ptr(), MAX_NODES + 1)
    };
    if bound == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Binds a byte range of a shared mapping that begins at `base`.
pub(crate) fn bind(base: NonNull<u8>, range: Range<u64>, node: u32) -> io::Result<()> {
    let mask = mask_of(node)?;
    let start = base.as_ptr().wrapping_add(range.start as usize);
    // SAFETY: the mask is read for MAX_NODES bits, which it has. The kernel counts one bit less
    // than it is told (mbind(2), notes). A policy changes no contents.
    let bound = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            range.end - range.start,
            libc::MPOL_BIND,
            mask.as_ptr(),
            MAX_NODES + 1,
            0,
        )
    };
    if bound == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::memfd::{Backing, SharedMemory};
    use std::fs;

    fn fake(list: &str, nodes: &[(u32, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("has_memory"), list).unwrap();
        for (node, meminfo) in nodes {
            let dir = root.path().join(format!("node{node}"));
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("meminfo"), meminfo).unwrap();
        }
        root
    }

    const MEMINFO: &str =
        "Node 0 MemTotal:       2048 kB\nNode 0 MemFree:         512 kB\nNode 0 MemUsed: 1 kB\n";

    #[test]
    fn reads_two_nodes_with_a_gap() {
        let root = fake("0,3\n", &[(0, MEMINFO), (3, MEMINFO)]);
        let node = |node| NumaNode { node, total_bytes: 2 << 20, free_bytes: 512 << 10 };
        assert_eq!(nodes(root.path()).unwrap(), [node(0), node(3)]);
    }

    #[test]
    fn a_kernel_without_numa_has_none() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(nodes(root.path()).unwrap(), []);
    }

    #[test]
    fn names_the_file_that_makes_no_sense() {
        for (root, file) in [
            (fake("0-", &[]), "has_memory"),
            (fake("0-99999999", &[]), "has_memory"),
            (fake("0", &[(0, "Node 0 MemTotal: many kB\n")]), "node0/meminfo"),
        ] {
            let error = nodes(root.path()).unwrap_err().to_string();
            assert!(error.contains(file), "{error}");
        }
    }

    #[test]
    fn the_kernels_lists() {
        assert_eq!(parse_list("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(parse_list(""), Some(vec![]));
        assert_eq!(parse_list("2-1"), None);
    }

    /// Binding to a node that exists works on every kernel with NUMA, be it the only node.
    #[test]
    fn binds_to_a_node_of_this_host_and_to_no_other() {
        let Some(node) = nodes(Path::new(SYSFS_NODES)).unwrap().first().copied() else {
            println!("skipped: binds_to_a_node: this kernel knows no NUMA");
            return;
        };
        let memory = SharedMemory::create("bound", 8192, Backing::BasePages).unwrap();
        match memory.bind(0..8192, node.node) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                println!("skipped: binds_to_a_node: mbind is forbidden here");
            }
            bound => {
                bound.unwrap();
                assert!(memory.bind(0..4096, MAX_NODES as u32 - 1).is_err());
                assert!(memory.bind(0..4096, u32::MAX).is_err());
            }
        }
    }

    #[test]
    fn what_a_thread_starts_takes_its_memory_from_the_node() {
        let Some(node) = nodes(Path::new(SYSFS_NODES)).unwrap().first().copied() else {
            println!("skipped: what_a_thread_starts: this kernel knows no NUMA");
            return;
        };
        // The policy is the thread's own, and ends with it.
        let bound = std::thread::spawn(move || {
            assert!(bind_thread(MAX_NODES as u32 - 1).is_err());
            assert!(bind_thread(u32::MAX).is_err());
            bind_thread(node.node)?;
            std::process::Command::new("cat").arg("/proc/self/numa_maps").output()
        });
        match bound.join().unwrap() {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                println!("skipped: what_a_thread_starts: set_mempolicy is forbidden here");
            }
            output => {
                let maps = String::from_utf8(output.unwrap().stdout).unwrap();
                let stack = maps.lines().find(|line| line.contains("stack")).expect("a stack");
                assert!(stack.contains(&format!("bind:{}", node.node)), "{stack}");
            }
        }
    }
}
