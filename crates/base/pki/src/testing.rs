//! For tests of whoever speaks with certificates: an authority in a directory of its own.

use crate::{Authority, CredentialsDir, Identity, Role, Wish};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// An authority whose directory is removed with it.
pub struct TestAuthority {
    scratch: TempDir,
    /// The authority.
    pub authority: Authority,
}

impl TestAuthority {
    /// A new one.
    pub fn in_scratch() -> TestAuthority {
        let scratch = tempfile::tempdir().expect("a directory");
        let authority = Authority::init(&scratch.path().join("pki")).expect("an authority");
        TestAuthority { scratch, authority }
    }

    /// Where there is room for other files of the test.
    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// The directory of a certificate that is good for a day, or of a new one in its place. A
    /// server's is for 127.0.0.1.
    pub fn issue(&self, name: &str, role: Role) -> PathBuf {
        let hosts = match role {
            Role::Manager | Role::Export => vec!["127.0.0.1".to_owned()],
            _ => Vec::new(),
        };
        let identity = Identity { name: name.to_owned(), role };
        let wish = Wish { identity, hosts, days: 1, renew: true };
        self.authority.issue(&wish).expect("issued").dir
    }

    /// The same, as those have it who speak with it.
    pub fn credentials(&self, name: &str, role: Role) -> Arc<CredentialsDir> {
        Arc::new(CredentialsDir::new(self.issue(name, role)))
    }
}
