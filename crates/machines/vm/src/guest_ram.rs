//! A user's QEMU command line, changed so that the guest's RAM can be paged.
//!
//! The machine's RAM gets a memory backend of shared memory where it has none; backends of private
//! memory become shared ones; a monitor of our own is added. Everything else stays as it was
//! written, and what cannot be paged is refused ([`crate::refusal`]).
//!
//! QEMU itself makes the memfd. The rejected alternative: the node makes it, and QEMU opens
//! `/proc/PID/fd/N`. The library hands over either memfd. But QEMU's own also works where QEMU may
//! not look into the node's `/proc` directory (another user, a container).

use crate::BACKEND_ID;
use crate::option::{OptionError, OptionValue, parse_size};
use crate::refusal::{self, Reason, Refusal};
use crate::words::{self, Word};
use hecaton_memory::Size;
use std::ffi::OsString;
use std::path::Path;

/// Settings that the user gives beside the command line.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// The guest's RAM at its start, if it was given.
    pub memory_bytes: Option<u64>,
    /// Where our monitor is to listen.
    pub monitor: &'a Path,
}

/// Why a command line cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// Parts of it are refused; all of them are named.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Refused(Vec<Refusal>),
    /// An option that cannot be read.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// A size that cannot be read.
    #[error("-m {0}: that is not a size; write for example -m 8G")]
    Size(String),
    /// Nothing says how large the guest's RAM is.
    #[error(
        "nothing says how much memory the machine has: give --memory SIZE, or -m in its command"
    )]
    NoSize,
    /// `--memory` and `-m` differ.
    #[error(
        "--memory {wanted} and -m {given} differ; leave one of them out", wanted = Size(*wanted),
        given = Size(*given)
    )]
    SizesDiffer {
        /// `--memory`.
        wanted: u64,
        /// `-m`.
        given: u64,
    },
    /// Backends of the NUMA nodes do not add up to the RAM.
    #[error(
        "the memory backends of the NUMA nodes have {} together, and the machine has {}; QEMU \
         wants them equal", Size(*backends), Size(*memory)
    )]
    NumaSizes {
        /// Together.
        backends: u64,
        /// `-m`.
        memory: u64,
    },
    /// The machine's RAM is a backend that is not there.
    #[error("the machine's memory backend `{0}` is not among the objects of the command line")]
    NoBackend(String),
    /// The id is ours.
    #[error("an object of the command line has the id `{BACKEND_ID}` already; give it another one")]
    IdTaken,
}

/// Changes the arguments of a command line, the program's name left out; see the module's text.
pub fn edit(arguments: &[OsString], wish: Wish<'_>) -> Result<Vec<OsString>, EditError> {
    let mut words = words::parse(arguments);
    let refused = refusals(&words)?;
    if !refused.is_empty() {
        return Err(EditError::Refused(refused));
    }
    let memory_bytes = set_memory_size(&mut words, wish.memory_bytes)?;
    share_backends(&mut words)?;
    let backends = backends(&words)?;
    let node_ids = numa_backends(&words)?;
    if !node_ids.is_empty() {
        let bytes =
            node_ids.iter().map(|id| backend_bytes(&backends, id)).sum::<Result<u64, _>>()?;
        if bytes != memory_bytes {
            return Err(EditError::NumaSizes { backends: bytes, memory: memory_bytes });
        }
    } else if let Some(id) = machine_backend(&words)? {
        backend_bytes(&backends, &id)?;
    } else {
        if backends.iter().any(|backend| backend.get("id") == Some(BACKEND_ID)) {
            return Err(EditError::IdTaken);
        }
        give_backend(&mut words, memory_bytes)?;
    }
    let monitor = wish.monitor.to_string_lossy().replace(',', ",,");
    let value = format!("unix:{monitor},server=on,wait=off");
    words.push(Word::Option { name: "qmp".to_owned(), value });
    Ok(words::to_arguments(&words))
}

/// All that cannot be with a paged guest.
pub(crate) fn refusals(words: &[Word]) -> Result<Vec<Refusal>, OptionError> {
    let mut refused = Vec::new();
    for word in words {
        let reason = match word {
            Word::Switch(name) => match name.as_str() {
                "mem-prealloc" => Some(Reason::Preallocated),
                "daemonize" => Some(Reason::Detached),
                _ => None,
            },
            Word::Option { name, value } => of_option(name, value)?,
            Word::Other(_) => None,
        };
        if let Some(reason) = reason {
            let subject = match word {
                Word::Option { name, value } => format!("-{name} {value}"),
                Word::Switch(name) => format!("-{name}"),
                Word::Other(text) => text.to_string_lossy().into_owned(),
            };
            refused.push(Refusal::new(subject, reason));
        }
    }
    Ok(refused)
}

fn of_option(name: &str, value: &str) -> Result<Option<Reason>, OptionError> {
    Ok(match name {
        "device" => refusal::of_device_option(&OptionValue::parse(value, "driver")?),
        "object" => {
            let object = OptionValue::parse(value, "qom-type")?;
            match object.get("qom-type") {
                Some(kind) if kind.starts_with("memory-backend-") => {
                    // Private memory of this type is made shared.
                    refusal::of_backend(&object).filter(|reason| {
                        !(kind == "memory-backend-ram" && *reason == Reason::Private)
                    })
                }
                Some(kind) => refusal::of_object(kind),
                None => None,
            }
        }
        "netdev" | "nic" | "net" => {
            let network = OptionValue::parse(value, "type")?;
            network.get("type").and_then(refusal::of_network)
        }
        "drive" => refusal::of_block(&OptionValue::parse(value, "file")?),
        "blockdev" => refusal::of_block(&OptionValue::parse(value, "driver")?),
        "overcommit" => {
            let overcommit = OptionValue::parse(value, "mem-lock")?;
            let off = matches!(overcommit.get("mem-lock"), None | Some("off" | "no" | "false"));
            (!off).then_some(Reason::Locked)
        }
        "realtime" => OptionValue::parse(value, "mlock")?.is_on("mlock").then_some(Reason::Locked),
        "mem-path" => Some(match value.contains("huge") {
            true => Reason::HugePages,
            false => Reason::Private,
        }),
        "machine" | "M" => {
            let machine = OptionValue::parse(value, "type")?;
            let encrypted = machine.get("confidential-guest-support").is_some()
                || machine.get("memory-encryption").is_some();
            encrypted.then_some(Reason::Encrypted)
        }
        "incoming" => value.starts_with("rdma:").then_some(Reason::PinnedByDevice),
        _ => None,
    })
}

/// Finds the size of the RAM, or writes it down.
fn set_memory_size(words: &mut Vec<Word>, wanted: Option<u64>) -> Result<u64, EditError> {
    let mut given = None;
    for word in words.iter() {
        if let Some(text) = word.value_of(&["m"]) {
            let option = OptionValue::parse(text, "size")?;
            if let Some(size) = option.get("size") {
                // QEMU rounds a size up to 8 KiB.
                let bytes = parse_size(size, 1 << 20).filter(|bytes| *bytes > 0);
                let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(8 << 10));
                given = Some(bytes.ok_or_else(|| EditError::Size(text.to_owned()))?);
            }
        }
    }
    match (wanted, given) {
        (Some(wanted), Some(given)) if wanted != given => {
            Err(EditError::SizesDiffer { wanted, given })
        }
        (_, Some(given)) => Ok(given),
        (Some(wanted), None) => {
            words.push(Word::Option { name: "m".to_owned(), value: format!("size={wanted}B") });
            Ok(wanted)
        }
        (None, None) => Err(EditError::NoSize),
    }
}

/// Makes backends of private memory shared ones.
fn share_backends(words: &mut [Word]) -> Result<(), OptionError> {
    for word in words {
        let Word::Option { name, value } = word else { continue };
        if name != "object" {
            continue;
        }
        let mut object = OptionValue::parse(value, "qom-type")?;
        if object.get("qom-type") == Some("memory-backend-ram") {
            object.set("qom-type", "memory-backend-memfd");
            object.set("share", "on");
            *value = object.to_text();
        }
    }
    Ok(())
}

fn backends(words: &[Word]) -> Result<Vec<OptionValue>, OptionError> {
    let mut found = Vec::new();
    for value in words.iter().filter_map(|word| word.value_of(&["object"])) {
        let object = OptionValue::parse(value, "qom-type")?;
        if object.get("qom-type").is_some_and(|kind| kind.starts_with("memory-backend-")) {
            found.push(object);
        }
    }
    Ok(found)
}

/// The ids of the backends that NUMA nodes have.
fn numa_backends(words: &[Word]) -> Result<Vec<String>, OptionError> {
    let mut ids = Vec::new();
    for value in words.iter().filter_map(|word| word.value_of(&["numa"])) {
        let node = OptionValue::parse(value, "type")?;
        ids.extend(node.get("memdev").map(str::to_owned));
    }
    Ok(ids)
}

fn machine_backend(words: &[Word]) -> Result<Option<String>, OptionError> {
    let mut id = None;
    for value in words.iter().filter_map(|word| word.value_of(&["machine", "M"])) {
        let machine = OptionValue::parse(value, "type")?;
        id = machine.get("memory-backend").map(str::to_owned).or(id);
    }
    Ok(id)
}

fn backend_bytes(backends: &[OptionValue], id: &str) -> Result<u64, EditError> {
    let backend = backends.iter().find(|backend| backend.get("id") == Some(id));
    let backend = backend.ok_or_else(|| EditError::NoBackend(id.to_owned()))?;
    let size = backend.get("size").unwrap_or_default();
    parse_size(size, 1).ok_or_else(|| EditError::Size(backend.to_text()))
}

fn give_backend(words: &mut Vec<Word>, bytes: u64) -> Result<(), OptionError> {
    let value = format!("memory-backend-memfd,id={BACKEND_ID},size={bytes}B,share=on");
    words.push(Word::Option { name: "object".to_owned(), value });
    let machine = words.iter_mut().rev().find_map(|word| match word {
        Word::Option { name, value } if name == "machine" || name == "M" => Some(value),
        _ => None,
    });
    match machine {
        Some(value) => {
            let mut option = OptionValue::parse(value, "type")?;
            option.set("memory-backend", BACKEND_ID);
            *value = option.to_text();
        }
        None => words.push(Word::Option {
            name: "machine".to_owned(),
            value: format!("memory-backend={BACKEND_ID}"),
        }),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn edited(command: &str, memory: Option<u64>) -> Result<String, EditError> {
        let arguments: Vec<OsString> = command.split_whitespace().map(Into::into).collect();
        let wish = Wish { memory_bytes: memory, monitor: Path::new("/run/x.qmp") };
        let edited = edit(&arguments, wish)?;
        Ok(edited.join(OsString::from(" ").as_os_str()).into_string().unwrap())
    }

    const MONITOR: &str = "-qmp unix:/run/x.qmp,server=on,wait=off";

    #[test]
    fn ram_without_a_backend_is_given_one() {
        assert_eq!(
            edited("-M q35,accel=tcg -m 1G disk.img", None).unwrap(),
            format!(
                "-M q35,accel=tcg,memory-backend=hecaton-ram -m 1G disk.img -object \
                 memory-backend-memfd,id=hecaton-ram,size=1073741824B,share=on {MONITOR}"
            )
        );
        assert_eq!(
            edited("-nographic", Some(1 << 20)).unwrap(),
            format!(
                "-nographic -m size=1048576B -object \
                 memory-backend-memfd,id=hecaton-ram,size=1048576B,share=on -machine \
                 memory-backend=hecaton-ram {MONITOR}"
            )
        );
    }

    #[test]
    fn backends_that_are_there_are_used() {
        let own =
            "-m 1G -object memory-backend-memfd,id=a,size=1G,share=on -machine memory-backend=a";
        assert_eq!(edited(own, None).unwrap(), format!("{own} {MONITOR}"));
        assert_eq!(
            edited("-m 1G -object memory-backend-ram,id=a,size=1G -machine memory-backend=a", None)
                .unwrap(),
            format!(
                "-m 1G -object memory-backend-memfd,id=a,size=1G,share=on -machine memory-backend=a \
                 {MONITOR}"
            )
        );
        let numa = "-m 2G -object memory-backend-memfd,id=a,size=1G -object \
                    memory-backend-memfd,id=b,size=1G -numa node,memdev=a -numa node,memdev=b";
        assert_eq!(edited(numa, Some(2 << 30)).unwrap(), format!("{numa} {MONITOR}"));
        let missing = edited("-m 1G -machine memory-backend=a", None);
        assert_eq!(missing, Err(EditError::NoBackend("a".into())));
        let uneven = edited(&numa.replace("-m 2G", "-m 3G"), None);
        assert!(matches!(uneven, Err(EditError::NumaSizes { .. })), "{uneven:?}");
    }

    #[test]
    fn sizes_must_be_there_and_agree() {
        assert_eq!(edited("-M q35", None), Err(EditError::NoSize));
        assert!(matches!(edited("-m x", None), Err(EditError::Size(_))));
        assert!(matches!(edited("-m 0", None), Err(EditError::Size(_))));
        edited("-m 1024", Some(1 << 30)).expect("equal");
        edited("-m size=1G,slots=4,maxmem=4G", Some(1 << 30)).expect("equal");
        let error = edited("-m 1G", Some(2 << 30)).expect_err("unequal");
        assert_eq!(error.to_string(), "--memory 2G and -m 1G differ; leave one of them out");
    }

    #[test]
    fn all_that_is_refused_is_named_at_once() {
        let error = edited(
            "-m 1G -mem-prealloc -device vfio-pci,host=1 -drive file=a,cache=none -overcommit \
             mem-lock=on -netdev vhost-user,id=n,chardev=c -mem-path /dev/hugepages -daemonize \
             -object sev-guest,id=s -machine q35,confidential-guest-support=s -device virtio-net",
            None,
        );
        let Err(EditError::Refused(refused)) = &error else { panic!("{error:?}") };
        let reasons: Vec<_> = refused.iter().map(|refusal| refusal.reason).collect();
        use Reason::{
            Detached, DirectIo, Encrypted, HugePages, Locked, MappedElsewhere, PinnedByDevice,
            Preallocated,
        };
        assert_eq!(
            reasons,
            [
                Preallocated,
                PinnedByDevice,
                DirectIo,
                Locked,
                MappedElsewhere,
                HugePages,
                Detached,
                Encrypted,
                Encrypted
            ]
        );
        assert_eq!(error.unwrap_err().to_string().lines().count(), 9);
    }

    #[test]
    fn the_id_of_our_backend_is_ours() {
        let taken = "-m 1G -object memory-backend-memfd,id=hecaton-ram,size=1G";
        assert_eq!(edited(taken, None), Err(EditError::IdTaken));
    }

    proptest! {
        #[test]
        fn what_is_not_about_memory_stays(
            before in proptest::collection::vec("(-name [a-z]{1,5}|-nographic|-smp [1-8]|[a-z]{1,6}\\.img)", 0..6),
        ) {
            let before = before.join(" ");
            let after = edited(&format!("{before} -m 64M"), None).unwrap();
            prop_assert!(after.starts_with(&before));
        }

        #[test]
        fn nothing_makes_it_panic(words in proptest::collection::vec("\\PC{0,20}|-[a-zM]{1,9}", 0..8)) {
            let arguments: Vec<OsString> = words.into_iter().map(Into::into).collect();
            let wish = Wish { memory_bytes: Some(1 << 20), monitor: Path::new("/m") };
            let _ = edit(&arguments, wish);
        }
    }
}
