//! Which certificates a command shows: `--tls-dir`, else `HECATON_TLS`.

use crate::terminal::failure::usage;
use anyhow::Context as _;
use hecaton_pki::{Credentials, CredentialsError, Role, Token};
use std::path::{self, Path, PathBuf};
use std::sync::Arc;
use std::{env, fs, io};

/// The variable that names the directory.
const VARIABLE: &str = "HECATON_TLS";

/// The certificates to show and to trust.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TlsArgs {
    /// The directory of the certificate, its key and the authority's certificate, as `hecaton pki
    /// issue` makes it [default: HECATON_TLS]
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
}

impl TlsArgs {
    fn dir(&self) -> Option<PathBuf> {
        let variable = || env::var_os(VARIABLE).filter(|dir| !dir.is_empty()).map(PathBuf::from);
        self.tls_dir.clone().or_else(variable)
    }

    /// For a manager, which speaks TLS if it has any.
    pub(crate) fn for_manager(&self) -> anyhow::Result<Option<Arc<Credentials>>> {
        let Some(dir) = self.dir() else { return Ok(None) };
        let credentials = open(&dir)?;
        check_role(&credentials, Role::Manager)?;
        Ok(Some(credentials))
    }

    /// For whoever asks the manager at `url`, which says whether they are needed.
    pub(crate) fn for_url(&self, url: &str) -> anyhow::Result<Option<Arc<Credentials>>> {
        match (url.starts_with("https://"), self.dir()) {
            (true, Some(dir)) => open(&dir).map(Some),
            (true, None) => usage!(
                "{url} takes certificates: name the directory that `hecaton pki issue` has made \
                 with --tls-dir DIR, or set {VARIABLE}"
            ),
            // A variable may be meant for another cluster; an option is not.
            (false, _) if self.tls_dir.is_some() => {
                usage!(
                    "--tls-dir is of no use with {url}, where nothing is encrypted: is it https?"
                )
            }
            (false, _) => Ok(None),
        }
    }

    /// Gets a certificate for the node `name` with the token in a file (`-`: standard input),
    /// unless there is a good one.
    pub(crate) fn join(&self, file: &Path, name: &str) -> anyhow::Result<()> {
        let Some(dir) = self.dir() else {
            usage!("--join needs a directory for the certificate: name one with --tls-dir DIR");
        };
        match Credentials::open(&dir) {
            Err(CredentialsError::Expired { .. }) => {}
            Err(CredentialsError::Io { source, .. })
                if source.kind() == io::ErrorKind::NotFound => {}
            // The command that uses the certificate reports its other faults.
            _ => return Ok(()),
        }
        let text = match file == Path::new("-") {
            true => io::read_to_string(io::stdin()),
            false => fs::read_to_string(file),
        };
        let text = text.with_context(|| format!("cannot read the token in {}", file.display()))?;
        let token: Token = text.parse().with_context(|| format!("--join {}", file.display()))?;
        hecaton_pki::join(&token, name, &dir)?;
        tracing::info!(dir = %dir.display(), "has a certificate from {}", token.at());
        Ok(())
    }

    /// For the node `name`, which may have no manager.
    pub(crate) fn for_node(
        &self,
        url: Option<&str>,
        name: &str,
    ) -> anyhow::Result<Option<Arc<Credentials>>> {
        let Some(url) = url else {
            if self.tls_dir.is_some() {
                usage!("--tls-dir is for a manager: name one with --manager https://HOST:PORT");
            }
            return Ok(None);
        };
        let Some(credentials) = self.for_url(url)? else { return Ok(None) };
        check_role(&credentials, Role::Node)?;
        let certified = &credentials.now().identity.name;
        if certified != name {
            usage!(
                "--name {name}: the certificate in {} is of node `{certified}`, and a node speaks \
                 for itself only",
                credentials.dir().display()
            );
        }
        Ok(Some(credentials))
    }
}

fn open(dir: &Path) -> anyhow::Result<Arc<Credentials>> {
    // Donors and pagers are told of it, and a node in another directory may adopt them.
    let read = path::absolute(dir).map(|dir| Credentials::open(&dir));
    let read = read.context("cannot tell which directory this is")?;
    Ok(Arc::new(read.with_context(|| format!("no certificates from {}", dir.display()))?))
}

fn check_role(credentials: &Credentials, wanted: Role) -> anyhow::Result<()> {
    let found = &credentials.now().identity;
    if found.role != wanted {
        usage!(
            "the certificate in {} is of {found}; `hecaton pki issue NAME --role {wanted}` makes \
             one that fits",
            credentials.dir().display()
        );
    }
    Ok(())
}
