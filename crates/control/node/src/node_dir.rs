//! The directory that a node lives in: `manager.json`, `node.sock` and the sockets of its children.
//!
//! One node per directory. The claim is a `flock` on the directory itself and not on a file in it.
//! The kernel drops the lock however the owner ends, so no pid file can go stale. The lock tells a
//! directory in use from one that a killed node left.
//!
//! The next node removes the files of a killed one, except the sockets of children that outlive
//! it. It adopts these children ([`crate::children::adopt`]), or they go on without a node.

use hecaton_memory::random_u64;
use hecaton_pager::adoption::is_listened_to;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

const CONTROL_SOCKET: &str = "node.sock";
const MANAGER_FILE: &str = "manager.json";
const LIFE_FILE: &str = "node.json";
const DONOR_PREFIX: &str = "donor-";
const VOLUME_PREFIX: &str = "volume-";
const SOCKET_SUFFIX: &str = ".sock";
/// Suffix of the socket at which a pager waits for a node. Programs attach at another socket.
const ADOPTION_SUFFIX: &str = ".sock.node";
const PAGER_PREFIX: &str = "pager-";
const MONITOR_PREFIX: &str = "vm-";
const MONITOR_SUFFIX: &str = ".qmp";

/// Bytes that fit in `sockaddr_un::sun_path` before its closing zero.
pub(crate) const MAX_SOCKET_PATH: usize = 107;

/// Attempts to claim a directory that its last owner is removing at this moment.
const CLAIM_ATTEMPTS: usize = 16;

/// Why a directory cannot be a node's.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Another process holds it.
    #[error("{0} is in use by another node; give this one a directory of its own with --dir")]
    InUse(PathBuf),
    /// It belongs to another user.
    #[error("{path} belongs to user {owner}, not to user {user}; choose another one with --dir")]
    OtherOwner {
        /// The directory.
        path: PathBuf,
        /// User id of its owner.
        owner: u32,
        /// User id of this process.
        user: u32,
    },
    /// Others may enter it.
    #[error(
        "{path} is open to other users (mode {mode:o}); run `chmod 700 {path}` or choose another \
         one with --dir"
    )]
    Open {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It is a file, or a symbolic link.
    #[error("{0} is not a directory; choose another one with --dir")]
    NotADirectory(PathBuf),
    /// A socket in it would have a name longer than the kernel takes.
    #[error(
        "{0} is too long a path for the sockets in it; choose one of at most {max} bytes with \
         --dir",
        max = MAX_SOCKET_PATH - "/pager-4294967295.sock".len()
    )]
    TooLong(PathBuf),
    /// The socket of a virtual machine's monitor would have a name longer than the kernel takes.
    #[error(
        "`{name}` is too long a name: {path} has more than the {MAX_SOCKET_PATH} bytes that a \
         socket's path may have; choose a shorter one with --name, or a shorter --dir"
    )]
    NameTooLong {
        /// The machine's name.
        name: String,
        /// The socket.
        path: PathBuf,
    },
    /// The kernel refuses.
    #[error("cannot use the directory {path}")]
    Io {
        /// The directory, or the file in it.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Contents of `manager.json`: where the cluster's manager listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagerFile {
    /// The manager's base URL, such as `http://127.0.0.1:7070`.
    pub url: String,
    /// The process that wrote the file.
    pub pid: u32,
}

/// Contents of `node.json`: which node lives here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Life {
    name: String,
    boot: u64,
    /// Incarnation of the memory that it lends.
    #[serde(default)]
    life: u64,
    #[serde(default)]
    standing: Standing,
    /// Donors that were about to be started in the place of others.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    starts: BTreeSet<String>,
}

/// Whether a node lends what it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// No manager has answered yet, who may know what it lent before.
    Waiting,
    /// The pages that it lent before are gone, and others must forget them first.
    Recovering,
    /// It may. Its donors may not have been told so yet.
    Allowed,
    /// It does.
    #[default]
    Lending,
}

/// State of a killed node that its successor needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lived {
    /// The life of what it lent.
    pub life: u64,
    /// Whether it lent.
    pub standing: Standing,
}

/// Which node lives in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The node's number, which outlives its process if that is killed.
    pub boot: u64,
    /// The one before it that was killed here, if there was one.
    pub killed: Option<Lived>,
    /// Donors that were started since that was noted, by a node that was killed before it noted
    /// more: they have nothing of what was lent.
    pub started: BTreeSet<String>,
}

/// The names of the things in a node's directory; claims nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePaths {
    dir: PathBuf,
}

impl NodePaths {
    /// The names in `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> NodePaths {
        NodePaths { dir: dir.into() }
    }

    /// The directory that is used when none is named: `$XDG_RUNTIME_DIR/hecaton`, or
    /// `/tmp/hecaton-UID` where there is no runtime directory.
    pub fn default_dir() -> PathBuf {
        match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
            Some(runtime) => Path::new(&runtime).join("hecaton"),
            None => PathBuf::from(format!("/tmp/hecaton-{}", rustix::process::geteuid().as_raw())),
        }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The node's control socket.
    pub fn control_socket(&self) -> PathBuf {
        self.dir.join(CONTROL_SOCKET)
    }

    /// The file that says where the manager is.
    pub fn manager_file(&self) -> PathBuf {
        self.dir.join(MANAGER_FILE)
    }

    /// Where the `number`th donor waits for a node to adopt it.
    pub fn donor_socket(&self, number: usize) -> PathBuf {
        self.dir.join(format!("{DONOR_PREFIX}{number}{SOCKET_SUFFIX}"))
    }

    /// Where the `number`th volume waits for a node to adopt it.
    pub fn volume_socket(&self, number: u64) -> PathBuf {
        self.dir.join(format!("{VOLUME_PREFIX}{number}{SOCKET_SUFFIX}"))
    }

    fn life_file(&self) -> PathBuf {
        self.dir.join(LIFE_FILE)
    }

    /// The socket of the `number`th pager that the node started.
    pub fn pager_socket(&self, number: u32) -> PathBuf {
        self.dir.join(format!("{PAGER_PREFIX}{number}.sock"))
    }

    /// Where that pager waits for a node to adopt it.
    pub fn pager_adoption(&self, number: u32) -> PathBuf {
        self.dir.join(format!("{PAGER_PREFIX}{number}{ADOPTION_SUFFIX}"))
    }

    /// The monitor of the virtual machine `name`. Fails if the kernel would not take the path.
    pub fn monitor_socket(&self, name: &str) -> Result<PathBuf, DirectoryError> {
        let path = self.dir.join(format!("{MONITOR_PREFIX}{name}{MONITOR_SUFFIX}"));
        match path.as_os_str().len() > MAX_SOCKET_PATH {
            true => Err(DirectoryError::NameTooLong { name: name.to_owned(), path }),
            false => Ok(path),
        }
    }

    /// Reads `manager.json`; `None` if it does not exist.
    pub fn read_manager_file(&self) -> io::Result<Option<ManagerFile>> {
        match fs::read(self.manager_file()) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A directory that this process holds. Dropping it removes what the node put there, and the
/// directory too if that leaves it empty.
#[derive(Debug)]
pub struct NodeDir {
    paths: NodePaths,
    _claim: OwnedFd,
}

impl NodeDir {
    /// Claims `dir`, making it if needed, and clears away what a killed node left there.
    pub fn claim(dir: &Path) -> Result<NodeDir, DirectoryError> {
        let dir = std::path::absolute(dir).map_err(|source| io_error(dir, source))?;
        let paths = NodePaths::new(&dir);
        if paths.pager_socket(u32::MAX).as_os_str().len() > MAX_SOCKET_PATH {
            return Err(DirectoryError::TooLong(dir));
        }
        for _ in 0..CLAIM_ATTEMPTS {
            if let Some(claim) = try_claim(&dir)? {
                let node_dir = NodeDir { paths, _claim: claim };
                node_dir.remove_our_files();
                return Ok(node_dir);
            }
        }
        Err(DirectoryError::InUse(dir))
    }

    /// The names in it.
    pub fn paths(&self) -> &NodePaths {
        &self.paths
    }

    /// Writes `manager.json`; a reader sees the old file or the new one, never half of one.
    pub fn write_manager_file(&self, url: &str) -> Result<(), DirectoryError> {
        let file = ManagerFile { url: url.to_owned(), pid: std::process::id() };
        let path = self.paths.manager_file();
        write_whole(&path, &file).map_err(|source| io_error(&path, source))
    }

    /// Which life of the node `name` this is: that of the one that was killed here, if it had the
    /// same name. To the manager it is the same node, back again; another node that takes the name
    /// has another directory, and so is told from it.
    pub fn identity(&self, name: &str) -> Identity {
        let path = self.paths.life_file();
        // One that cannot be read is none: the node then waits until its predecessor is forgotten.
        let known = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        match known.filter(|life: &Life| life.name == name) {
            Some(Life { boot, life, standing, starts, .. }) => {
                Identity { boot, killed: Some(Lived { life, standing }), started: starts }
            }
            None => Identity { boot: random_u64(), killed: None, started: BTreeSet::new() },
        }
    }

    /// Notes what the node is now, for one that is started here should this one be killed.
    pub fn write_life(&self, name: &str, boot: u64, lived: Lived) -> Result<(), DirectoryError> {
        self.write_life_file(name, boot, lived, BTreeSet::new())
    }

    /// Notes that donors of the node are about to be started; else one that is started here should
    /// this one be killed would take them for those that had what was lent. The node may yet fail
    /// to start, and so what was noted of the one before stands.
    pub fn write_starts<'a>(
        &self,
        name: &str,
        identity: &Identity,
        donors: impl Iterator<Item = &'a str>,
    ) -> Result<(), DirectoryError> {
        let none = || Lived { life: random_u64(), standing: Standing::Waiting };
        let mut starts = identity.started.clone();
        starts.extend(donors.map(str::to_owned));
        self.write_life_file(name, identity.boot, identity.killed.unwrap_or_else(none), starts)
    }

    fn write_life_file(
        &self,
        name: &str,
        boot: u64,
        Lived { life, standing }: Lived,
        starts: BTreeSet<String>,
    ) -> Result<(), DirectoryError> {
        let path = self.paths.life_file();
        let file = Life { name: name.to_owned(), boot, life, standing, starts };
        write_whole(&path, &file).map_err(|source| io_error(&path, source))
    }

    /// Numbers of the pagers that the node before this one has left, or that have sockets here.
    pub(crate) fn pager_numbers(&self) -> BTreeSet<u32> {
        self.names().filter_map(|name| pager_number(&name)).collect()
    }

    /// Where donors may be that the node before this one has left.
    pub(crate) fn donor_sockets(&self) -> Vec<PathBuf> {
        let donors = self.names().filter(|name| number_of(name, DONOR_PREFIX).is_some());
        donors.map(|name| self.paths.dir.join(name)).collect()
    }

    /// Numbers of the volumes that the node before this one may have left.
    pub(crate) fn volume_numbers(&self) -> BTreeSet<u64> {
        self.names().filter_map(|name| number_of(&name, VOLUME_PREFIX)).collect()
    }

    /// Removes what the node put there, and the directory if that leaves it empty. While a child
    /// waits there for another node, that one is still the same to the manager.
    pub fn clear(&self) {
        if !self.remove_our_files() {
            let _ = fs::remove_file(self.paths.life_file());
        }
        // Not empty: somebody else keeps files here.
        let _ = fs::remove_dir(self.paths.dir());
    }

    /// Removes what a node has put there and no child listens to, except which node it was. True if
    /// some child does listen.
    fn remove_our_files(&self) -> bool {
        let pagers = self.pager_numbers().into_iter();
        let pagers: BTreeSet<u32> =
            pagers.filter(|&number| is_listened_to(&self.paths.pager_adoption(number))).collect();
        let mut is_waited = false;
        for name in self.names().filter(|name| is_ours(name)) {
            let path = self.paths.dir.join(&name);
            let is_childs = match pager_number(&name) {
                Some(number) => pagers.contains(&number),
                // A machine's monitor is a child's, too, of somebody else's child.
                None => !is_nodes(&name) && is_listened_to(&path),
            };
            is_waited |= is_childs;
            if !is_childs {
                // A path that stays in use fails, and is reported, when the node binds it.
                let _ = fs::remove_file(path);
            }
        }
        is_waited
    }

    fn names(&self) -> impl Iterator<Item = String> {
        let entries = fs::read_dir(self.paths.dir()).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok())
    }
}

/// Whether files of this name come of a node.
fn is_ours(name: &str) -> bool {
    let is_child = |prefix| name.starts_with(prefix) && name.contains(SOCKET_SUFFIX);
    let is_monitor = name.starts_with(MONITOR_PREFIX) && name.ends_with(MONITOR_SUFFIX);
    let is_childs = [PAGER_PREFIX, DONOR_PREFIX, VOLUME_PREFIX].into_iter().any(is_child);
    is_childs || is_monitor || is_nodes(name)
}

/// Whether they are the node's own, and not its children's. Which node it was, outlives it.
fn is_nodes(name: &str) -> bool {
    let is_half_written = name.strip_suffix(".new").is_some_and(|name| name == LIFE_FILE);
    name == CONTROL_SOCKET || name.starts_with(MANAGER_FILE) || is_half_written
}

/// Which child of a kind has a socket of this name.
fn number_of(name: &str, prefix: &str) -> Option<u64> {
    name.strip_prefix(prefix)?.strip_suffix(SOCKET_SUFFIX)?.parse().ok()
}

/// Which pager has a socket of this name.
fn pager_number(name: &str) -> Option<u32> {
    name.strip_prefix(PAGER_PREFIX)?.split_once(SOCKET_SUFFIX)?.0.parse().ok()
}

/// Writes a file of JSON; a reader sees the old one or the new one, never half of one.
pub(crate) fn write_whole(path: &Path, what: &impl Serialize) -> io::Result<()> {
    let unfinished = path.with_extension("json.new");
    fs::write(&unfinished, serde_json::to_vec(what)?)?;
    fs::rename(&unfinished, path)
}

impl Drop for NodeDir {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Makes, checks and locks the directory; `None` if its last owner removed it meanwhile.
fn try_claim(dir: &Path) -> Result<Option<OwnedFd>, DirectoryError> {
    if let Err(source) = DirBuilder::new().recursive(true).mode(0o700).create(dir) {
        return Err(match source.kind() {
            io::ErrorKind::AlreadyExists => DirectoryError::NotADirectory(dir.to_owned()),
            _ => io_error(dir, source),
        });
    }
    // NOFOLLOW: in /tmp, a link of that name may be somebody's trap.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let claim = match rustix::fs::open(dir, flags, Mode::empty()) {
        Ok(fd) => fd,
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP | Errno::NOTDIR) => {
            return Err(DirectoryError::NotADirectory(dir.to_owned()));
        }
        Err(errno) => return Err(io_error(dir, errno.into())),
    };
    let opened = rustix::fs::fstat(&claim).map_err(|errno| io_error(dir, errno.into()))?;
    let user = rustix::process::geteuid().as_raw();
    if opened.st_uid != user {
        return Err(DirectoryError::OtherOwner {
            path: dir.to_owned(),
            owner: opened.st_uid,
            user,
        });
    }
    if opened.st_mode & 0o077 != 0 {
        return Err(DirectoryError::Open { path: dir.to_owned(), mode: opened.st_mode & 0o7777 });
    }
    match rustix::fs::flock(&claim, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Err(DirectoryError::InUse(dir.to_owned())),
        Err(errno) => return Err(io_error(dir, errno.into())),
    }
    // Between the open and the lock the last owner may have removed the directory: then the lock
    // is on something that nobody else can find.
    let still_there = fs::symlink_metadata(dir)
        .is_ok_and(|now| now.dev() == opened.st_dev && now.ino() == opened.st_ino);
    Ok(still_there.then_some(claim))
}

fn io_error(path: &Path, source: io::Error) -> DirectoryError {
    DirectoryError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn parent() -> tempfile::TempDir {
        tempfile::tempdir().expect("a temporary directory")
    }

    #[test]
    fn is_made_private_and_removed_again() {
        let parent = parent();
        let path = parent.path().join("a/b");
        let dir = NodeDir::claim(&path).expect("claimed");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        dir.write_manager_file("http://127.0.0.1:1").expect("written");
        assert_eq!(
            dir.paths().read_manager_file().unwrap().map(|file| file.url),
            Some("http://127.0.0.1:1".to_owned())
        );
        drop(dir);
        assert!(!path.exists());
    }

    #[test]
    fn is_claimed_once() {
        let parent = parent();
        let path = parent.path().join("node");
        let first = NodeDir::claim(&path).expect("claimed");
        assert!(matches!(NodeDir::claim(&path), Err(DirectoryError::InUse(_))));
        drop(first);
        NodeDir::claim(&path).expect("free again");
    }

    #[test]
    fn what_a_killed_node_left_is_cleared_and_what_is_not_ours_stays() {
        let parent = parent();
        let path = parent.path().join("node");
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        for name in [
            "node.sock",
            "manager.json",
            "pager-7.sock",
            "pager-7.sock.ctl",
            "donor-1.sock",
            "vm-a.qmp",
            "notes.txt",
        ] {
            fs::write(path.join(name), "").unwrap();
        }
        let dir = NodeDir::claim(&path).expect("reused");
        let names = || {
            let entries = fs::read_dir(&path).unwrap();
            entries.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
        };
        assert_eq!(names(), ["notes.txt"]);
        drop(dir);
        assert_eq!(names(), ["notes.txt"]);
    }

    #[test]
    fn who_still_listens_is_left_there() {
        let parent = parent();
        let path = parent.path().join("node");
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        let bind = |name| std::os::unix::net::UnixListener::bind(path.join(name)).unwrap();
        let children = ["donor-1.sock", "pager-3.sock.node", "vm-a.qmp"].map(bind);
        for name in ["pager-3.sock", "pager-3.sock.ctl", "pager-4.sock", "pager-4.sock.node"] {
            fs::write(path.join(name), "").unwrap();
        }
        let dir = NodeDir::claim(&path).expect("reused");
        let killed = Lived { life: 6, standing: Standing::Lending };
        dir.write_life("a", 5, killed).expect("written");
        dir.clear();
        let identity = |boot| Identity { boot, killed: Some(killed), started: BTreeSet::new() };
        assert_eq!(dir.identity("a"), identity(5));
        assert_eq!(dir.donor_sockets(), [path.join("donor-1.sock")]);
        assert_eq!(dir.pager_numbers(), BTreeSet::from([3]));
        for name in ["pager-3.sock", "pager-3.sock.ctl", "pager-3.sock.node", "vm-a.qmp"] {
            assert!(path.join(name).exists(), "{name}");
        }
        drop(children);
        drop(dir);
        assert!(!path.exists());
    }

    #[test]
    fn a_killed_nodes_life_goes_on_under_its_name() {
        let parent = parent();
        let path = parent.path().join("node");
        let dir = NodeDir::claim(&path).expect("claimed");
        let boot = dir.identity("a").boot;
        let killed = Lived { life: 6, standing: Standing::Recovering };
        dir.write_life("a", boot, killed).expect("written");
        // As if it had been killed: nothing is removed, the claim is dropped.
        let left = fs::read(path.join(LIFE_FILE)).unwrap();
        drop(dir);
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        fs::write(path.join(LIFE_FILE), left).unwrap();
        let dir = NodeDir::claim(&path).expect("reused");
        let identity = Identity { boot, killed: Some(killed), started: BTreeSet::new() };
        assert_eq!(dir.identity("a"), identity);
        let other = dir.identity("b");
        assert!(other.boot != boot && other.killed.is_none());
        dir.write_life("b", other.boot, killed).expect("written");
        assert_ne!(dir.identity("a").boot, boot);
        fs::write(path.join(LIFE_FILE), "{").unwrap();
        assert_eq!(dir.identity("b").killed, None);
        fs::write(path.join(LIFE_FILE), r#"{"name": "c", "boot": 3, "life": 4}"#).unwrap();
        let earlier = Lived { life: 4, standing: Standing::Lending };
        assert_eq!(dir.identity("c").killed, Some(earlier), "of an earlier version");
    }

    #[test]
    fn donors_that_were_started_last_are_known_until_a_life_is_noted() {
        let parent = parent();
        let dir = NodeDir::claim(&parent.path().join("node")).expect("claimed");
        let first = dir.identity("a");
        dir.write_starts("a", &first, ["d", "e"].into_iter()).expect("written");
        let second = dir.identity("a");
        assert_eq!(
            (second.boot, &second.started),
            (first.boot, &["d", "e"].map(String::from).into())
        );
        assert!(second.killed.is_some_and(|killed| killed.standing == Standing::Waiting));
        let killed = Lived { life: 6, standing: Standing::Allowed };
        dir.write_life("a", second.boot, killed).expect("written");
        let third = dir.identity("a");
        assert!(third.started.is_empty());
        dir.write_starts("a", &third, ["d"].into_iter()).expect("written");
        dir.write_starts("a", &dir.identity("a"), ["e"].into_iter()).expect("written");
        let fourth = dir.identity("a");
        assert_eq!((fourth.killed, &fourth.started), (Some(killed), &second.started));
    }

    #[test]
    fn one_that_is_open_to_others_a_file_or_a_link_is_refused() {
        let parent = parent();
        let open = parent.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(NodeDir::claim(&open), Err(DirectoryError::Open { mode: 0o755, .. })));
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(matches!(NodeDir::claim(&file), Err(DirectoryError::NotADirectory(_))));
        let link = parent.path().join("link");
        symlink(&open, &link).unwrap();
        assert!(matches!(NodeDir::claim(&link), Err(DirectoryError::NotADirectory(_))));
    }

    #[test]
    fn a_path_too_long_for_sockets_is_refused() {
        let parent = parent();
        let path = parent.path().join("x".repeat(MAX_SOCKET_PATH));
        assert!(matches!(NodeDir::claim(&path), Err(DirectoryError::TooLong(_))));
        assert!(!path.exists());
    }
}
