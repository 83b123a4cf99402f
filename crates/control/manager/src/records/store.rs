//! Stores the registry in a file.
//!
//! redb writes a commit whole or not at all. A damaged registry is refused, not repaired by
//! guessing; the way out is to begin anew. A cluster gets its memory back without the registry:
//! nodes report their names, and donors their orders.

use crate::records::lasting::{Changes, Lasting, NodeRecord};
use hecaton_policy::cluster::choice::Named;
use redb::backends::FileBackend;
use redb::{
    Builder, Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError,
    TableDefinition, TableError,
};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The file's name in its directory.
const FILE: &str = "registry.redb";

/// The file while it is made.
const UNFINISHED: &str = "registry.redb.new";

/// The form of what is written, to be raised when an older manager would misread it.
const FORMAT: u64 = 1;

/// Memory for pages of the file: all of a registry of the most nodes fits into it.
const CACHE_BYTES: usize = 4 << 20;

/// `format` and `epoch`.
const CLUSTER: TableDefinition<'_, &str, u64> = TableDefinition::new("cluster");
/// Node names, and their records as JSON.
const NODES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("nodes");
/// Donor names.
const DRAINING: TableDefinition<'_, &str, ()> = TableDefinition::new("draining");
/// Donor names, and bytes.
const LIMITS: TableDefinition<'_, &str, u64> = TableDefinition::new("limits");
/// `policy`, as JSON, if one was chosen. Files of earlier versions have no such table.
const POLICY: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("policy");
/// `quota`, if one was set. Nor this.
const HARVEST: TableDefinition<'_, &str, u64> = TableDefinition::new("harvest");
/// Node names, and what they have been granted of it as JSON. Nor this.
const HARVEST_RECORDS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("harvest_records");

/// Why the registry is not read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another manager has it open.
    #[error(
        "the registry {0} is in use by another manager; stop that one, or give this one a \
         directory of its own with --state"
    )]
    InUse(PathBuf),
    /// It is cut off, was changed by others, or never was a registry.
    #[error(
        "the registry {path} is damaged ({reason}), and nothing in it is used; move it aside with \
         `mv {path} {path}.damaged` and start the manager again: nodes register within a second, \
         and tell what their donors had been told",
        path = .path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Damage that was found.
        reason: String,
    },
    /// A later version wrote it.
    #[error(
        "the registry {path} is of format {found}, and this version reads up to {FORMAT}; use the \
         version of Hecaton that wrote it, or another directory with --state",
        path = .path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// Format of the file.
        found: u64,
    },
    /// The kernel refuses.
    #[error("cannot use the registry {path}", path = .path.display())]
    Io {
        /// The file or its directory.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// It is open and cannot be written.
    #[error(
        "cannot write the registry {path}; with room on its disk the next attempt succeeds",
        path = .path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// Error of redb.
        source: Box<redb::Error>,
    },
}

/// An open registry file.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    /// `None` after an error: redb wants to be opened again then.
    database: Option<Database>,
    /// Holds the lock that keeps a second manager out from before the file exists.
    _dir: File,
}

impl Store {
    /// Opens the registry in `dir`, or begins one there, and reads it.
    pub fn open(dir: &Path) -> Result<(Store, Lasting), StoreError> {
        let io_error = |source| StoreError::Io { path: dir.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io_error)?;
        let path = dir.join(FILE);
        let held = File::open(dir).map_err(io_error)?;
        match rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(StoreError::InUse(path)),
            Err(errno) => return Err(io_error(errno.into())),
        }
        match path.try_exists() {
            Ok(true) => {}
            Ok(false) => make(dir, &held)?,
            Err(source) => return Err(io_error(source)),
        }
        let database = open(&path)?;
        let lasting = read(&database, &path)?;
        Ok((Store { path, database: Some(database), _dir: held }, lasting))
    }

    /// Writes `changes` so that they outlive a power failure, all or none.
    pub fn write(&mut self, changes: &Changes) -> Result<(), StoreError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => open(&self.path)?,
        };
        match write(&database, changes) {
            Ok(()) => {
                self.database = Some(database);
                Ok(())
            }
            Err(source) => {
                Err(StoreError::Write { path: self.path.clone(), source: Box::new(source) })
            }
        }
    }
}

/// Makes an empty registry beside its place and then moves it there. So a file in that place is
/// always a whole one.
fn make(dir: &Path, held: &File) -> Result<(), StoreError> {
    let (path, unfinished) = (dir.join(FILE), dir.join(UNFINISHED));
    let io_error = |source| StoreError::Io { path: unfinished.clone(), source };
    match fs::remove_file(&unfinished) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(io_error(source)),
        _ => {}
    }
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&unfinished);
    let file = file.map_err(io_error)?;
    let made = FileBackend::new(file).and_then(|backend| builder().create_with_backend(backend));
    let made = made.map_err(redb::Error::from).and_then(|database| {
        let changes = Changes { epoch: Some(0), ..Changes::default() };
        write(&database, &changes)?;
        Ok(database.close()?)
    });
    made.map_err(|source| StoreError::Write {
        path: unfinished.clone(),
        source: Box::new(source),
    })?;
    let moved = fs::rename(&unfinished, &path).and_then(|()| held.sync_all());
    moved.map_err(|source| StoreError::Io { path, source })
}

fn builder() -> Builder {
    let mut builder = Database::builder();
    // Otherwise a file that others have changed may be believed, or end the process.
    builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
    builder
}

fn open(path: &Path) -> Result<Database, StoreError> {
    builder().open(path).map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse(path.to_owned()),
        DatabaseError::Storage(StorageError::Io(source)) if is_of_the_disk(&source) => {
            StoreError::Io { path: path.to_owned(), source }
        }
        error => damaged(path, error),
    })
}

/// Whether the kernel said no, and not redb of what it has read.
fn is_of_the_disk(error: &io::Error) -> bool {
    error.raw_os_error().is_some()
}

fn damaged(path: &Path, reason: impl ToString) -> StoreError {
    // A message of one line, whatever was found in the file.
    let reason = reason.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    StoreError::Damaged { path: path.to_owned(), reason }
}

fn write(database: &Database, changes: &Changes) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    {
        let mut cluster = transaction.open_table(CLUSTER)?;
        cluster.insert("format", FORMAT)?;
        if let Some(epoch) = changes.epoch {
            cluster.insert("epoch", epoch)?;
        }
        let mut nodes = transaction.open_table(NODES)?;
        for (name, record) in &changes.nodes {
            match record {
                Some(record) => {
                    let json = serde_json::to_vec(record).map_err(io::Error::from)?;
                    nodes.insert(name.as_str(), json.as_slice())?;
                }
                None => _ = nodes.remove(name.as_str())?,
            }
        }
        let mut draining = transaction.open_table(DRAINING)?;
        for (donor, is_draining) in &changes.draining {
            match is_draining {
                true => _ = draining.insert(donor.as_str(), ())?,
                false => _ = draining.remove(donor.as_str())?,
            }
        }
        let mut limits = transaction.open_table(LIMITS)?;
        for (donor, limit_bytes) in &changes.limits {
            match limit_bytes {
                Some(bytes) => _ = limits.insert(donor.as_str(), *bytes)?,
                None => _ = limits.remove(donor.as_str())?,
            }
        }
        let mut policy = transaction.open_table(POLICY)?;
        match &changes.policy {
            Some(Some(choice)) => {
                let json = serde_json::to_vec(choice).map_err(io::Error::from)?;
                policy.insert("policy", json.as_slice())?;
            }
            Some(None) => _ = policy.remove("policy")?,
            None => {}
        }
        let mut harvest = transaction.open_table(HARVEST)?;
        match changes.harvest_quota {
            Some(Some(quota)) => _ = harvest.insert("quota", quota)?,
            Some(None) => _ = harvest.remove("quota")?,
            None => {}
        }
        let mut records = transaction.open_table(HARVEST_RECORDS)?;
        for (name, record) in &changes.harvest_records {
            match record {
                Some(record) => {
                    let json = serde_json::to_vec(record).map_err(io::Error::from)?;
                    records.insert(name.as_str(), json.as_slice())?;
                }
                None => _ = records.remove(name.as_str())?,
            }
        }
    }
    Ok(transaction.commit()?)
}

fn read(database: &Database, path: &Path) -> Result<Lasting, StoreError> {
    let found = read_format(database).map_err(|error| damaged(path, error))?;
    if found > FORMAT {
        return Err(StoreError::Format { path: path.to_owned(), found });
    }
    read_all(database).map_err(|error| damaged(path, error))
}

fn read_format(database: &Database) -> Result<u64, redb::Error> {
    let cluster = database.begin_read()?.open_table(CLUSTER)?;
    let format = cluster.get("format")?;
    Ok(format.ok_or_else(|| io::Error::other("it does not say its format"))?.value())
}

fn read_all(database: &Database) -> Result<Lasting, redb::Error> {
    let transaction = database.begin_read()?;
    let mut lasting = Lasting::default();
    let epoch = transaction.open_table(CLUSTER)?.get("epoch")?;
    lasting.epoch = epoch.ok_or_else(|| io::Error::other("it has no epoch"))?.value();
    for entry in transaction.open_table(NODES)?.iter()? {
        let (name, record) = entry?;
        let name = name.value().to_owned();
        let record: NodeRecord = serde_json::from_slice(record.value())
            .map_err(|error| io::Error::other(format!("the record of node `{name}`: {error}")))?;
        lasting.nodes.insert(name, record);
    }
    for entry in transaction.open_table(DRAINING)?.iter()? {
        lasting.draining.insert(entry?.0.value().to_owned());
    }
    for entry in transaction.open_table(LIMITS)?.iter()? {
        let (donor, bytes) = entry?;
        lasting.limits.insert(donor.value().to_owned(), bytes.value());
    }
    match transaction.open_table(POLICY) {
        Ok(table) => {
            let choice = table.get("policy")?;
            let parsed = choice.map(|json| serde_json::from_slice::<Named>(json.value()));
            lasting.policy = parsed
                .transpose()
                .map_err(|error| io::Error::other(format!("the policy: {error}")))?;
        }
        Err(TableError::TableDoesNotExist(_)) => {}
        Err(error) => return Err(error.into()),
    }
    match transaction.open_table(HARVEST) {
        Ok(table) => lasting.harvest_quota = table.get("quota")?.map(|quota| quota.value()),
        Err(TableError::TableDoesNotExist(_)) => {}
        Err(error) => return Err(error.into()),
    }
    match transaction.open_table(HARVEST_RECORDS) {
        Ok(table) => {
            for entry in table.iter()? {
                let (name, record) = entry?;
                let name = name.value().to_owned();
                let record = serde_json::from_slice(record.value()).map_err(|error| {
                    io::Error::other(format!("what node `{name}` was granted: {error}"))
                })?;
                lasting.harvest_records.insert(name, record);
            }
        }
        Err(TableError::TableDoesNotExist(_)) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(lasting)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harvest::HarvestRecord;
    use hecaton_policy::cluster::choice::Choice;
    use proptest::prelude::*;
    use std::os::unix::fs::{FileExt, PermissionsExt};

    fn scratch() -> tempfile::TempDir {
        tempfile::tempdir().expect("a directory")
    }

    fn record(boot: u64) -> Option<NodeRecord> {
        Some(NodeRecord {
            boot,
            pid: 1,
            location: Some("rack 7".to_owned()),
            donors: vec!["a".to_owned()],
        })
    }

    fn granted() -> HarvestRecord {
        HarvestRecord { machines: 2, number: 7, counted: None }
    }

    fn changes() -> Changes {
        Changes {
            epoch: Some(3),
            nodes: [("a".to_owned(), record(1)), ("b".to_owned(), record(2))].into(),
            draining: [("a".to_owned(), true)].into(),
            limits: [("b".to_owned(), Some(1 << 30))].into(),
            policy: Some(Some(Choice::GreedyRemote { request_pages: 7 })),
            harvest_quota: Some(Some(5)),
            harvest_records: [("a".to_owned(), Some(granted()))].into(),
        }
    }

    /// A registry with something in it, closed in good order.
    fn written() -> (tempfile::TempDir, Lasting) {
        let scratch = scratch();
        let (mut store, mut lasting) = Store::open(scratch.path()).expect("begun");
        assert_eq!(lasting, Lasting::default());
        store.write(&changes()).expect("written");
        lasting.apply(&changes());
        (scratch, lasting)
    }

    #[test]
    fn what_was_written_is_read_again() {
        let (scratch, mut lasting) = written();
        let (mut store, found) = Store::open(scratch.path()).expect("opened");
        assert_eq!(found, lasting);
        let gone = Changes {
            nodes: [("a".to_owned(), None)].into(),
            draining: [("a".to_owned(), false)].into(),
            limits: [("b".to_owned(), None)].into(),
            policy: Some(None),
            harvest_quota: Some(None),
            harvest_records: [("a".to_owned(), None)].into(),
            ..Changes::default()
        };
        store.write(&gone).expect("written");
        drop(store);
        lasting.apply(&gone);
        let (_, found) = Store::open(scratch.path()).expect("opened");
        assert_eq!(found, lasting);
        assert!(found.draining.is_empty() && found.limits.is_empty() && found.nodes.len() == 1);
        assert_eq!(found.policy, None);
        assert_eq!((found.harvest_quota, found.harvest_records.len()), (None, 0));
        let mode = fs::metadata(scratch.path().join(FILE)).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_second_manager_is_refused() {
        let scratch = scratch();
        let first = Store::open(scratch.path()).expect("begun");
        let second = Store::open(scratch.path());
        assert!(matches!(second, Err(StoreError::InUse(path)) if path.ends_with(FILE)));
        drop(first);
        Store::open(scratch.path()).expect("free again");
    }

    #[test]
    fn one_that_was_begun_and_not_finished_is_begun_again() {
        let scratch = scratch();
        fs::write(scratch.path().join(UNFINISHED), "half").expect("written");
        Store::open(scratch.path()).expect("begun");
        assert!(!scratch.path().join(UNFINISHED).exists());
    }

    #[test]
    fn a_file_of_before_there_were_policies_has_none() {
        let (scratch, whole) = written();
        let database = open(&scratch.path().join(FILE)).expect("opened");
        let transaction = database.begin_write().expect("begun");
        assert!(transaction.delete_table(POLICY).expect("deleted"), "there was none");
        transaction.commit().expect("written");
        drop(database);
        let (_, found) = Store::open(scratch.path()).expect("opened");
        assert_eq!(found, Lasting { policy: None, ..whole });
    }

    #[test]
    fn a_policy_of_a_later_version_stays_as_it_is_until_another_is_set() {
        let (scratch, whole) = written();
        let database = open(&scratch.path().join(FILE)).expect("opened");
        let record: &[u8] = br#"{"policy":"fair", "spread":{"of":3}}"#;
        let transaction = database.begin_write().expect("begun");
        transaction.open_table(POLICY).unwrap().insert("policy", record).unwrap();
        transaction.commit().expect("written");
        drop(database);
        let (mut store, found) = Store::open(scratch.path()).expect("opened");
        let fair = Named::Unknown { policy: "fair".to_owned() };
        assert_eq!(found, Lasting { policy: Some(fair), ..whole });
        let others = Changes { epoch: Some(4), ..changes() };
        store.write(&Changes { policy: None, ..others.clone() }).expect("written");
        drop(store);
        let database = open(&scratch.path().join(FILE)).expect("opened");
        let table = database.begin_read().unwrap().open_table(POLICY).unwrap();
        assert_eq!(table.get("policy").unwrap().expect("it is there").value(), record);
        drop((table, database));
        let (mut store, _) = Store::open(scratch.path()).expect("opened");
        store.write(&others).expect("written");
        drop(store);
        let (_, found) = Store::open(scratch.path()).expect("opened");
        assert_eq!(found.policy, Some(Named::Known(Choice::GreedyRemote { request_pages: 7 })));
    }

    #[test]
    fn a_later_format_is_not_read() {
        let (scratch, _) = written();
        let database = open(&scratch.path().join(FILE)).expect("opened");
        let transaction = database.begin_write().expect("begun");
        transaction.open_table(CLUSTER).unwrap().insert("format", FORMAT + 1).unwrap();
        transaction.commit().expect("written");
        drop(database);
        let error = Store::open(scratch.path()).expect_err("refused");
        assert!(matches!(error, StoreError::Format { found, .. } if found == FORMAT + 1));
    }

    /// Refused, with the file's name and the way back in one line; or nothing of it was lost.
    fn refused_or_whole(dir: &Path, whole: &Lasting) -> bool {
        match Store::open(dir) {
            Ok((_, found)) => {
                assert_eq!(found, *whole, "something else is believed");
                false
            }
            Err(error) => {
                let text = error.to_string();
                assert!(matches!(error, StoreError::Damaged { .. }), "{error:?}");
                let file = dir.join(FILE).display().to_string();
                assert!(text.contains(&file) && text.contains("mv "), "{text}");
                assert!(!text.contains('\n'), "{text}");
                true
            }
        }
    }

    #[test]
    fn a_registry_that_is_cut_off_is_refused() {
        let (scratch, whole) = written();
        let path = scratch.path().join(FILE);
        let bytes = fs::read(&path).expect("read");
        for kept in [0, 1, 7, 64, 320, 4095, 4096, bytes.len() / 2, bytes.len() - 1] {
            fs::write(&path, &bytes[..kept]).expect("written");
            assert!(refused_or_whole(scratch.path(), &whole), "{kept} bytes are enough");
        }
        fs::write(&path, &bytes).expect("written");
        assert!(!refused_or_whole(scratch.path(), &whole), "all bytes are");
    }

    #[test]
    fn what_never_was_a_registry_is_refused() {
        let (scratch, whole) = written();
        for garbage in [vec![b'x'; 1 << 16], vec![0; 1 << 16], b"{}\n".to_vec()] {
            fs::write(scratch.path().join(FILE), garbage).expect("written");
            assert!(refused_or_whole(scratch.path(), &whole));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Wherever bytes are changed: either it is seen, or they meant nothing.
        #[test]
        fn a_registry_that_others_have_changed_is_refused_or_whole(
            at in any::<prop::sample::Index>(),
            near_start in any::<bool>(),
            garbage in prop::collection::vec(any::<u8>(), 1..64),
        ) {
            let (scratch, whole) = written();
            let path = scratch.path().join(FILE);
            let length = fs::metadata(&path).unwrap().len() as usize;
            let at = at.index(if near_start { 512 } else { length });
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&garbage, at as u64).unwrap();
            drop(file);
            refused_or_whole(scratch.path(), &whole);
        }
    }
}
