//! Credentials for a service that is not Hecaton's own, such as etcd: its authority is another one,
//! and its certificates say nothing of roles.

use crate::trust::credentials::{CredentialsError, Files, client, servers};
use crate::trust::watched::Watched;
use rustls::ClientConfig;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// A directory with the service's authorities, and a certificate that the service knows us by:
/// files of the same names as in [`Credentials`](crate::Credentials).
#[derive(Debug)]
pub struct OutsideCredentials(Watched<Outside>);

/// Contents of the files at one moment.
pub(crate) struct Outside {
    pub(crate) generation: u64,
    pub(crate) client: Arc<ClientConfig>,
}

impl fmt::Debug for Outside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nothing secret.
        f.debug_struct("Outside").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl OutsideCredentials {
    /// Reads what is in `dir`.
    pub fn open(dir: &Path) -> Result<OutsideCredentials, CredentialsError> {
        Watched::open(dir, load).map(OutsideCredentials)
    }

    /// Where they are.
    pub fn dir(&self) -> &Path {
        self.0.dir()
    }

    pub(crate) fn now(&self) -> Arc<Outside> {
        self.0.now()
    }
}

fn load(dir: &Path, generation: u64) -> Result<Outside, CredentialsError> {
    let files = Files::read(dir)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = servers(&files.roots, &provider, &files.revoked);
    let verifier = verifier.map_err(|error| files.unfit(error))?;
    let client = client(&provider, verifier, &files).map_err(|error| files.unfit(error))?;
    Ok(Outside { generation, client })
}
