//! Reads the files of a credentials directory, and rereads them when they change.

use crate::trust::credentials::{CA_FILE, CERTIFICATE_FILE, CRL_FILE, CredentialsError, KEY_FILE};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Reads the files of a directory. The number is the generation of the result.
type Load<T> = fn(&Path, u64) -> Result<T, CredentialsError>;

/// A directory, and the last usable contents of its files.
#[derive(Debug)]
pub(crate) struct Watched<T> {
    dir: PathBuf,
    load: Load<T>,
    current: Mutex<Current<T>>,
}

#[derive(Debug)]
struct Current<T> {
    stamps: Stamps,
    generation: u64,
    loaded: Arc<T>,
}

/// Inode, length and mtime of each file: one differs if a file is replaced, changed or removed.
type Stamps = [Option<(u64, u64, i64, i64)>; 4];

impl<T> Watched<T> {
    pub(crate) fn open(dir: &Path, load: Load<T>) -> Result<Watched<T>, CredentialsError> {
        let stamps = stamps(dir);
        let loaded = Arc::new(load(dir, 0)?);
        let current = Mutex::new(Current { stamps, generation: 0, loaded });
        Ok(Watched { dir: dir.to_owned(), load, current })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The current contents; the previous ones if the current ones cannot be used.
    pub(crate) fn now(&self) -> Arc<T> {
        let mut current = self.current.lock().expect("no thread panics with it");
        let stamps = stamps(&self.dir);
        if stamps != current.stamps {
            current.stamps = stamps;
            match (self.load)(&self.dir, current.generation + 1) {
                Ok(loaded) => {
                    tracing::info!(dir = %self.dir.display(), "read the certificates again");
                    current.generation += 1;
                    current.loaded = Arc::new(loaded);
                }
                Err(error) => {
                    let source = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(%error, source, "going on with the certificates as they were");
                }
            }
        }
        Arc::clone(&current.loaded)
    }
}

fn stamps(dir: &Path) -> Stamps {
    [CA_FILE, CERTIFICATE_FILE, KEY_FILE, CRL_FILE].map(|name| {
        let found = fs::metadata(dir.join(name)).ok()?;
        Some((found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
    })
}
