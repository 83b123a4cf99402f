//! A user's QEMU command line, given memory that its host's agent has admitted it to.
//!
//! The agent decides the machine's memory: its start size, its NUMA nodes of the host, and how much
//! can be plugged there later. A command line that sets memory itself is therefore refused.
//! [`edit`] adds:
//!
//! - a shared memory file for each part,
//! - a virtio-mem device for each part that can grow,
//! - the monitor through which the machine grows,
//! - the port to the manager inside ([`guest_port`](crate::guest_port)).
//!
//! Memory files are preferred to anonymous memory: by `/proc/PID/fd` the host can tell how much of
//! each file is resident.
//!
//! A machine with a [balloon](crate::balloon) has a single file of its maximum size, and no
//! virtio-mem device.

use crate::guest_port::PORT_NAME;
use crate::option::{OptionError, OptionValue};
use crate::refusal::{self, Reason};
use crate::words::{self, Word};
use hecaton_memory::Size;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::Path;

/// Every size is a multiple of this, virtio-mem's block size included: one huge page.
pub const BLOCK_BYTES: u64 = 2 << 20;

/// Guest address space that QEMU may lose for each device, to place it where a memory block begins.
const ALIGNMENT_BYTES: u64 = 1 << 30;

/// The driver of the devices by which a machine grows.
pub const GROWING_DRIVER: &str = "virtio-mem-pci";

/// The driver of the device by which a machine gives back that has all of its memory from the
/// start.
pub const BALLOON_DRIVER: &str = "virtio-balloon-pci";

/// Balloon property that gives back free pages outside the balloon.
const REPORTING: &str = "free-page-reporting";

/// A machine's memory. Each part is a NUMA node of the guest, in this order; the first has memory
/// from the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// One for each node of the host that it has memory of, or may have.
    pub parts: Vec<Part>,
    /// It has all of it from the start, in one part, and gives back by a balloon.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_ballooned: bool,
}

/// Present and possible memory of a machine on one NUMA node of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The host's node, by the kernel's number; none on a host with one node, where nothing is
    /// bound.
    pub host_node: Option<u32>,
    /// As long as it runs, in bytes.
    pub base_bytes: u64,
    /// The most that can be plugged, or is in no balloon, beyond that, in bytes; zero for no
    /// device.
    pub more_bytes: u64,
}

impl Memory {
    /// Plans a machine with `base_bytes` on each of the host's nodes (`nodes` has their numbers).
    /// It may grow to `max_bytes` in all, on any of them. Each device's size differs from all other
    /// sizes: the host recognises a memory file by its size.
    pub fn plan(nodes: &[u32], base_bytes: &[u64], max_bytes: u64) -> Memory {
        let may_grow = max_bytes.saturating_sub(base_bytes.iter().sum());
        let mut parts: Vec<Part> = nodes
            .iter()
            .zip(base_bytes)
            .map(|(node, base)| Part {
                host_node: (nodes.len() > 1).then_some(*node),
                base_bytes: *base,
                more_bytes: may_grow,
            })
            .filter(|part| part.base_bytes > 0 || part.more_bytes > 0)
            .collect();
        // Stable: the nodes stay in their order.
        parts.sort_by_key(|part| part.base_bytes == 0);
        for at in 0..parts.len() {
            if parts[at].more_bytes == 0 {
                continue;
            }
            let is_taken = |bytes: u64, parts: &[Part]| {
                parts.iter().any(|part| part.base_bytes == bytes)
                    || parts[..at].iter().any(|part| part.more_bytes == bytes)
            };
            while is_taken(parts[at].more_bytes, &parts) {
                parts[at].more_bytes += BLOCK_BYTES;
            }
        }
        Memory { parts, is_ballooned: false }
    }

    /// Plans a machine that has `max_bytes` of one node from its start, and may shrink to
    /// `min_bytes`. `host_node` is `None` on a host with one node.
    pub fn with_balloon(host_node: Option<u32>, min_bytes: u64, max_bytes: u64) -> Memory {
        let more_bytes = max_bytes.saturating_sub(min_bytes);
        let part = Part { host_node, base_bytes: min_bytes, more_bytes };
        Memory { parts: vec![part], is_ballooned: true }
    }

    /// Plans a container that begins with `min_bytes` and may grow to `max_bytes` on one node.
    /// `host_node` is `None` on a host with one node.
    pub fn of_container(host_node: Option<u32>, min_bytes: u64, max_bytes: u64) -> Memory {
        Memory { is_ballooned: false, ..Memory::with_balloon(host_node, min_bytes, max_bytes) }
    }

    /// The sizes of a part's memory files: of the one that is there from the start, and of a
    /// virtio-mem device's. Zero for none.
    pub fn files(&self, part: &Part) -> [u64; 2] {
        match self.is_ballooned {
            true => [part.base_bytes + part.more_bytes, 0],
            false => [part.base_bytes, part.more_bytes],
        }
    }

    /// Bytes that the machine has as long as it runs.
    pub fn base_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.base_bytes).sum()
    }

    /// The id of the device of a part.
    pub fn device_id(part: usize) -> String {
        format!("hecaton-mem{part}")
    }
}

/// Why a command line cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// It says itself what memory the machine has.
    #[error(
        "{what}: how much memory the machine has and where is given before the `--` and set up by \
         Hecaton; leave it out"
    )]
    OwnMemory {
        /// The option.
        what: String,
    },
    /// QEMU discards nothing then.
    #[error(
        "{what}: a device that reads and writes guest memory without page faults pins it all, and the balloon gives \
         nothing back; leave it out, or leave out --balloon"
    )]
    Pins {
        /// The option.
        what: String,
    },
    /// Its process would not be the one that was started.
    #[error("-daemonize: the machine is known by the process that was started; leave it out")]
    Detached,
    /// An option that cannot be read.
    #[error(transparent)]
    Option(#[from] OptionError),
}

/// Why a size cannot be a machine's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Nothing at all.
    #[error("0 bytes cannot be a machine's memory; give {} at least", Size(BLOCK_BYTES))]
    Nothing,
    /// No multiple of the block.
    #[error(
        "{bytes} bytes are no multiple of {}, the block in which memory is plugged; take {} or {}",
        Size(BLOCK_BYTES), Size(*below), Size(*above)
    )]
    NoBlocks {
        /// The given size, in bytes.
        bytes: u64,
        /// The nearest below.
        below: u64,
        /// The nearest above.
        above: u64,
    },
    /// The minimum is above the maximum.
    #[error("a minimum of {} is more than the maximum of {}; exchange them", Size(*min), Size(*max))]
    MinAboveMax {
        /// The given minimum, in bytes.
        min: u64,
        /// The given maximum, in bytes.
        max: u64,
    },
}

/// Whether a machine can have from `min_bytes` to `max_bytes`: equal ones for a machine that does
/// not grow.
pub fn check_sizes(min_bytes: u64, max_bytes: u64) -> Result<(), SizeError> {
    for bytes in [min_bytes, max_bytes] {
        if bytes == 0 {
            return Err(SizeError::Nothing);
        }
        if !bytes.is_multiple_of(BLOCK_BYTES) {
            let below = bytes / BLOCK_BYTES * BLOCK_BYTES;
            let above = below.saturating_add(BLOCK_BYTES);
            return Err(SizeError::NoBlocks { bytes, below, above });
        }
    }
    if min_bytes > max_bytes {
        return Err(SizeError::MinAboveMax { min: min_bytes, max: max_bytes });
    }
    Ok(())
}

/// The command line with this memory, its program left out; see the module's text. `guest_port`:
/// where the port to the manager inside listens, of a machine that has one.
pub fn edit(
    arguments: &[OsString],
    memory: &Memory,
    monitor: &Path,
    guest_port: Option<&Path>,
) -> Result<Vec<OsString>, CreateError> {
    let mut words = words::parse(arguments);
    for word in &words {
        check_word(word, memory.is_ballooned)?;
    }
    let mut add = |name: &str, value: String| {
        words.push(Word::Option { name: name.to_owned(), value });
    };
    let files: Vec<[u64; 2]> = memory.parts.iter().map(|part| memory.files(part)).collect();
    let base: u64 = files.iter().map(|[base, _]| base).sum();
    let more: u64 = files.iter().map(|[_, more]| more).sum();
    let devices = files.iter().filter(|[_, more]| *more > 0).count() as u64;
    add(
        "m",
        match devices {
            0 => format!("size={base}B"),
            _ => format!("size={base}B,maxmem={}B", base + more + (devices + 1) * ALIGNMENT_BYTES),
        },
    );
    let is_numa = memory.parts.len() > 1;
    for (number, (part, [base, more])) in memory.parts.iter().zip(files).enumerate() {
        let bound = part
            .host_node
            .map_or_else(String::new, |node| format!(",host-nodes={node},policy=bind"));
        let file = |id: &str, bytes: u64| {
            format!("memory-backend-memfd,id=hecaton-{id}{number},size={bytes}B,share=on{bound}")
        };
        let mut node = format!("node,nodeid={number}");
        if base > 0 {
            add("object", file("base", base));
            node += &format!(",memdev=hecaton-base{number}");
        }
        match is_numa {
            true => add("numa", node),
            false => add("machine", format!("memory-backend=hecaton-base{number}")),
        }
        if more > 0 {
            add("object", file("more", more));
            let id = Memory::device_id(number);
            let place = if is_numa { format!(",node={number}") } else { String::new() };
            add(
                "device",
                format!(
                    "{GROWING_DRIVER},id={id},memdev=hecaton-more{number}{place},\
                 block-size={BLOCK_BYTES},requested-size=0"
                ),
            );
        }
    }
    if memory.is_ballooned {
        let id = Memory::device_id(0);
        // A guest that is out of memory kills its own, and takes nothing back that may be somebody
        // else's by then.
        add("device", format!("{BALLOON_DRIVER},id={id},{REPORTING}=on,deflate-on-oom=off"));
        // Its next kernel would have the balloon's memory before it knows of the balloon.
        add("action", "reboot=shutdown".to_owned());
    }
    let quoted = |path: &Path| path.to_string_lossy().replace(',', ",,");
    add("qmp", format!("unix:{},server=on,wait=off", quoted(monitor)));
    if let Some(path) = guest_port {
        // A controller of its own: the user's may be full.
        add("device", "virtio-serial-pci,id=hecaton-serial,max_ports=2".to_owned());
        let path = quoted(path);
        add("chardev", format!("socket,id=hecaton-guest,path={path},server=on,wait=off"));
        add(
            "device",
            format!("virtserialport,bus=hecaton-serial.0,chardev=hecaton-guest,name={PORT_NAME}"),
        );
    }
    Ok(words::to_arguments(&words))
}

/// Refuses what is about the machine's memory.
fn check_word(word: &Word, is_ballooned: bool) -> Result<(), CreateError> {
    let (name, value) = match word {
        Word::Switch(name) if name == "daemonize" => return Err(CreateError::Detached),
        Word::Switch(name) if name == "mem-prealloc" => {
            return Err(CreateError::OwnMemory { what: format!("-{name}") });
        }
        Word::Option { name, value } => (name.as_str(), value),
        Word::Switch(_) | Word::Other(_) => return Ok(()),
    };
    let is_own = match name {
        "m" | "mem-path" | "numa" => true,
        "machine" | "M" => OptionValue::parse(value, "type")?.get("memory-backend").is_some(),
        "object" => {
            let object = OptionValue::parse(value, "qom-type")?;
            object.get("qom-type").is_some_and(|kind| kind.starts_with("memory-backend-"))
        }
        "device" => {
            let device = OptionValue::parse(value, "driver")?;
            if is_ballooned && refusal::of_device_option(&device) == Some(Reason::PinnedByDevice) {
                return Err(CreateError::Pins { what: format!("-{name} {value}") });
            }
            device.get("driver").is_some_and(|driver| {
                driver.starts_with("virtio-mem")
                    || matches!(driver, "pc-dimm" | "nvdimm")
                    || is_ballooned && driver.starts_with("virtio-balloon")
            })
        }
        _ => false,
    };
    match is_own {
        true => Err(CreateError::OwnMemory { what: format!("-{name} {value}") }),
        false => Ok(()),
    }
}

/// Whether QEMU can make a machine grow, by what `-device virtio-mem-pci,help` prints. `-device
/// help`, which lists them all, fails where QEMU does not find all of its modules.
pub fn can_grow(device_help: &str) -> bool {
    device_help.contains(&format!("{GROWING_DRIVER} options"))
}

/// Whether QEMU can make a machine give back by a balloon, by what `-device
/// virtio-balloon-pci,help` prints.
pub fn can_balloon(device_help: &str) -> bool {
    device_help.contains(&format!(" {REPORTING}="))
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    fn edited(command: &str, memory: &Memory) -> Result<String, CreateError> {
        let arguments: Vec<OsString> = command.split_whitespace().map(Into::into).collect();
        let port = memory.parts.iter().any(|part| part.more_bytes > 0).then_some("/run/a,b.guest");
        let edited = edit(&arguments, memory, Path::new("/run/a,b.qmp"), port.map(Path::new))?;
        Ok(edited.join(OsString::from(" ").as_os_str()).into_string().unwrap())
    }

    #[test]
    fn a_machine_gets_its_memory_and_its_device() {
        let regular = Memory::plan(&[0], &[4 * M], 4 * M);
        assert_eq!(
            edited("-M q35 disk.img", &regular).unwrap(),
            "-M q35 disk.img -m size=4194304B -object \
             memory-backend-memfd,id=hecaton-base0,size=4194304B,share=on -machine \
             memory-backend=hecaton-base0 -qmp unix:/run/a,,b.qmp,server=on,wait=off"
        );
        let harvest = Memory::plan(&[0], &[2 * M], 8 * M);
        assert_eq!(
            edited("-nographic", &harvest).unwrap(),
            "-nographic -m size=2097152B,maxmem=2155872256B -object \
             memory-backend-memfd,id=hecaton-base0,size=2097152B,share=on -machine \
             memory-backend=hecaton-base0 -object \
             memory-backend-memfd,id=hecaton-more0,size=6291456B,share=on -device \
             virtio-mem-pci,id=hecaton-mem0,memdev=hecaton-more0,block-size=2097152,requested-size=0 \
             -qmp unix:/run/a,,b.qmp,server=on,wait=off -device \
             virtio-serial-pci,id=hecaton-serial,max_ports=2 -chardev \
             socket,id=hecaton-guest,path=/run/a,,b.guest,server=on,wait=off -device \
             virtserialport,bus=hecaton-serial.0,chardev=hecaton-guest,name=org.hecaton.guest.0"
        );
    }

    #[test]
    fn one_with_a_balloon_has_its_maximum_from_the_start() {
        let memory = Memory::with_balloon(None, 2 * M, 8 * M);
        assert_eq!(
            edited("-nographic", &memory).unwrap(),
            "-nographic -m size=8388608B -object \
             memory-backend-memfd,id=hecaton-base0,size=8388608B,share=on -machine \
             memory-backend=hecaton-base0 -device \
             virtio-balloon-pci,id=hecaton-mem0,free-page-reporting=on,deflate-on-oom=off -action \
             reboot=shutdown -qmp unix:/run/a,,b.qmp,server=on,wait=off -device \
             virtio-serial-pci,id=hecaton-serial,max_ports=2 -chardev \
             socket,id=hecaton-guest,path=/run/a,,b.guest,server=on,wait=off -device \
             virtserialport,bus=hecaton-serial.0,chardev=hecaton-guest,name=org.hecaton.guest.0"
        );
        let bound = edited("", &Memory::with_balloon(Some(3), 2 * M, 8 * M)).unwrap();
        assert!(bound.contains("share=on,host-nodes=3,policy=bind -machine"), "{bound}");
        let own = "-device virtio-balloon-pci,id=b";
        let error = edited(own, &memory).expect_err("two balloons").to_string();
        assert!(error.starts_with(own), "{error}");
        let error = edited("-device vfio-pci,host=1", &memory).expect_err("no balloon").to_string();
        assert!(error.contains("the balloon gives nothing back"), "{error}");
        edited(own, &Memory::plan(&[0], &[2 * M], 8 * M)).expect("it has no other");
    }

    #[test]
    fn each_node_of_the_host_is_one_of_the_guest() {
        let memory = Memory::plan(&[0, 2], &[0, 4 * M], 8 * M);
        let nodes: Vec<_> = memory.parts.iter().map(|part| part.host_node).collect();
        assert_eq!(nodes, [Some(2), Some(0)], "the first has memory from the start");
        let line = edited("", &memory).unwrap();
        for part in [
            "id=hecaton-base0,size=4194304B,share=on,host-nodes=2,policy=bind",
            "-numa node,nodeid=0,memdev=hecaton-base0",
            "-numa node,nodeid=1 ",
            "id=hecaton-more1,size=8388608B,share=on,host-nodes=0,policy=bind",
            "memdev=hecaton-more1,node=1,",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert!(!line.contains("memory-backend=") && !line.contains("hecaton-base1"), "{line}");
    }

    #[test]
    fn devices_are_known_by_their_size() {
        let memory = Memory::plan(&[0, 1], &[4 * M, 4 * M], 12 * M);
        let sizes: Vec<_> = memory.parts.iter().map(|part| part.more_bytes).collect();
        assert_eq!(sizes, [6 * M, 8 * M]);
        assert_eq!(Memory::plan(&[0, 1], &[4 * M, 0], 4 * M).parts.len(), 1);
    }

    #[test]
    fn what_says_itself_what_memory_it_has_is_refused() {
        let memory = Memory::plan(&[0], &[2 * M], 2 * M);
        for command in [
            "-m 1G",
            "-numa node",
            "-machine q35,memory-backend=x",
            "-object memory-backend-ram,id=x,size=1G",
            "-device virtio-mem-pci,id=x",
            "-mem-prealloc",
        ] {
            let error = edited(command, &memory).expect_err(command).to_string();
            assert!(error.starts_with(command) && error.contains("leave it out"), "{error}");
        }
        assert_eq!(edited("-daemonize", &memory), Err(CreateError::Detached));
        edited("-object rng-random,id=r -device virtio-rng-pci,rng=r", &memory).expect("fine");
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(check_sizes(2 * M, 4 * M), Ok(()));
        assert_eq!(check_sizes(0, 4 * M), Err(SizeError::Nothing));
        let words = |min, max| check_sizes(min, max).expect_err("cannot be").to_string();
        assert!(words(3 * M, 4 * M).contains("take 2M or 4M"), "{}", words(3 * M, 4 * M));
        assert!(words(6 * M, 4 * M).contains("6M is more than the maximum of 4M"));
    }

    #[test]
    fn a_qemu_that_cannot_grow_is_told_from_one_that_can() {
        let help = "virtio-mem-pci options:\n  acpi-index=<uint32>    -  (default: 0)\n";
        assert!(can_grow(help));
        assert!(!can_grow("-device virtio-mem-pci,help: Device 'virtio-mem-pci' not found\n"));
        let help =
            "virtio-balloon-pci options:\n  free-page-hint=<bool>  - on/off (default: off)\n";
        assert!(!can_balloon(help), "it gives nothing back but what the balloon holds");
        assert!(can_balloon(&format!(
            "{help}  free-page-reporting=<bool> - on/off (default: off)\n"
        )));
    }
}
