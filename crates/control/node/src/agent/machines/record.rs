//! The directory of the machines: for each a monitor's socket, and a file that says what the
//! machine is.
//!
//! The file is written when the machine is admitted and before its launcher is told, so that what
//! was promised is known to the next agent, also of a machine whose QEMU has not opened its monitor
//! yet. It counts as long as the process runs that it names: the launcher, which becomes QEMU; of a
//! container, as long as any process of its group does.

use crate::agent::machines::process::ProcessId;
use crate::node_dir::{MAX_SOCKET_PATH, write_whole};
use hecaton_broker::NewcomerKind;
use hecaton_vm::create::Memory;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// Extension of the records' file names.
const RECORD: &str = "json";

/// A machine, as the file beside its monitor says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) name: String,
    pub(crate) kind: NewcomerKind,
    pub(crate) process: ProcessId,
    /// The most that it may have; what it has from its start, if it does not grow.
    pub(crate) max_bytes: u64,
    pub(crate) memory: Memory,
    /// Cores that it has as long as it exists; 0 if it takes no part in their division.
    #[serde(default, skip_serializing_if = "crate::socket::message::takes_no_part")]
    pub(crate) cores: u32,
    /// It is warned, shut down or killed for others: when it has ended, that was why, also to an
    /// agent that was not there.
    #[serde(default)]
    pub(crate) gives_way: bool,
    /// Set for a libvirt domain only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) domain: Option<DomainRecord>,
    /// Directory of a container's memory cgroup. `process` is then the container's first process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cgroup: Option<PathBuf>,
}

/// Facts that only a libvirt domain has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DomainRecord {
    /// libvirt's name for it that stays.
    pub(crate) uuid: String,
    /// Where the port of the manager inside it listens, if it has one.
    pub(crate) guest_port: Option<PathBuf>,
    /// It was admitted and has not been seen to run: the process is the one that asked.
    pub(crate) is_promised: bool,
}

impl Record {
    /// File name of its record without the extension. Only a domain's contains a colon, since the
    /// name of another machine cannot.
    pub(crate) fn stem(&self) -> String {
        match &self.domain {
            Some(domain) => format!("libvirt:{}", domain.uuid),
            None => self.name.clone(),
        }
    }
}

/// The directory. Nobody else has it.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    _lock: File,
}

/// Why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Another agent has it.
    #[error(
        "--qmp-dir {0} is another agent's, which runs; two of them would promise the same memory twice"
    )]
    Taken(PathBuf),
    /// Not to be used.
    #[error("--qmp-dir {path} cannot be used")]
    Io {
        /// The directory.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

impl Directory {
    /// Makes it if need be, and keeps others from it.
    pub(crate) fn claim(path: &Path) -> Result<Directory, RecordError> {
        let failed = |source| RecordError::Io { path: path.to_owned(), source };
        let path = std::path::absolute(path).map_err(failed)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(failed)?;
        let lock = File::create(path.join("agent.lock")).map_err(failed)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Directory { path, _lock: lock }),
            Err(Errno::WOULDBLOCK) => Err(RecordError::Taken(path)),
            Err(errno) => Err(failed(errno.into())),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where the machine's monitor listens; the reason if it cannot.
    pub(crate) fn socket(&self, name: &str) -> Result<PathBuf, String> {
        self.path_of(name, "qmp")
    }

    /// Where the port of the manager inside it listens; the reason if it cannot.
    pub(crate) fn guest_socket(&self, name: &str) -> Result<PathBuf, String> {
        self.path_of(name, "guest")
    }

    fn path_of(&self, name: &str, extension: &str) -> Result<PathBuf, String> {
        let path = self.path.join(format!("{name}.{extension}"));
        let length = path.as_os_str().len();
        match length <= MAX_SOCKET_PATH {
            true => Ok(path),
            false => Err(format!(
                "the socket's path {} has {length} bytes, and {MAX_SOCKET_PATH} can be; choose a shorter name, or a \
                 shorter --qmp-dir",
                path.display()
            )),
        }
    }

    fn file(&self, stem: &str) -> PathBuf {
        self.path.join(format!("{stem}.{RECORD}"))
    }

    /// Writes a record: whole, or not at all.
    pub(crate) fn write(&self, record: &Record) -> io::Result<()> {
        write_whole(&self.file(&record.stem()), record)
    }

    /// Removes a machine's record and sockets; a domain's are libvirt's own matter.
    pub(crate) fn remove(&self, record: &Record) {
        let stem = record.stem();
        // The sockets first: without a record nobody would look for them.
        let sockets =
            ["qmp", "guest"].map(|extension| self.path.join(format!("{stem}.{extension}")));
        for path in sockets.into_iter().chain([self.file(&stem)]) {
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(%error, path = %path.display(), "cannot be removed");
            }
        }
    }

    /// All records. A file that holds no valid record is logged and left in place.
    pub(crate) fn records(&self) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != RECORD) {
                continue;
            }
            let read = fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
            match read {
                Ok(record) => records.push(record),
                Err(error) => {
                    tracing::warn!(%error, path = %path.display(), "no machine's record");
                }
            }
        }
        Ok(records)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_may_have_any_name() {
        let parent = tempfile::tempdir().unwrap();
        let directory = Directory::claim(parent.path()).expect("claimed");
        let uuid = "c658e799-9abf-47ea-9ca1-b129d4958fe3".to_owned();
        let record = Record {
            name: "libvirt:../my domain".into(),
            kind: NewcomerKind::Regular,
            process: ProcessId::of(std::process::id()).unwrap(),
            max_bytes: 4 << 20,
            memory: Memory::plan(&[0], &[4 << 20], 4 << 20),
            cores: 0,
            gives_way: false,
            domain: Some(DomainRecord { uuid, guest_port: None, is_promised: true }),
            cgroup: None,
        };
        directory.write(&record).expect("written");
        assert_eq!(directory.records().unwrap(), std::slice::from_ref(&record));
        directory.remove(&record);
        assert_eq!(directory.records().unwrap(), []);
    }

    #[test]
    fn records_outlive_who_wrote_them_and_two_agents_do_not_share_a_directory() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("vms");
        let directory = Directory::claim(&path).expect("claimed");
        let error = Directory::claim(&path).expect_err("it is taken").to_string();
        assert!(error.contains("another agent's"), "{error}");
        let record = Record {
            name: "a.b".into(),
            kind: NewcomerKind::Harvest,
            process: ProcessId::of(std::process::id()).unwrap(),
            max_bytes: 8 << 20,
            memory: Memory::plan(&[0], &[4 << 20], 8 << 20),
            cores: 3,
            gives_way: true,
            domain: None,
            cgroup: Some("/sys/fs/cgroup/hecaton-vm-a.b".into()),
        };
        directory.write(&record).expect("written");
        // Half of one, of an agent that was killed; and nobody's.
        fs::write(path.join("c.json.new"), "{").unwrap();
        fs::write(path.join("d.json"), "{").unwrap();
        drop(directory);
        let directory = Directory::claim(&path).expect("free again");
        assert_eq!(directory.records().unwrap(), std::slice::from_ref(&record));
        let sockets = [directory.socket("a.b").unwrap(), directory.guest_socket("a.b").unwrap()];
        sockets.iter().for_each(|path| fs::write(path, "").unwrap());
        directory.remove(&record);
        assert_eq!(directory.records().unwrap(), []);
        assert!(!sockets.iter().any(|path| path.exists()));
        assert!(directory.socket(&"n".repeat(100)).unwrap_err().contains("shorter name"));
    }
}
