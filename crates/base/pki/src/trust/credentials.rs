//! The files by which a party says who it is and knows others, read again when they have changed.
//!
//! | file | what |
//! |---|---|
//! | `ca.pem` | the authorities that are trusted, one or more |
//! | `cert.pem`, `key.pem` | the party's certificate, those up to the authority, and its key |
//! | `crl.pem` | lists of what the authorities have revoked; need not be there |

use crate::identity::{Identity, IdentityError, Role};
use crate::trust::by_role::{require, signatures_of_the_first};
use crate::trust::peers::peers;
use crate::trust::watched::Watched;
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime, pem,
};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use x509_parser::prelude::{FromDer, X509Certificate};

pub(crate) const CA_FILE: &str = "ca.pem";
pub(crate) const CERTIFICATE_FILE: &str = "cert.pem";
pub(crate) const KEY_FILE: &str = "key.pem";
pub(crate) const CRL_FILE: &str = "crl.pem";

/// Why the files in a directory are no credentials.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error(
        "cannot read {}; a directory of certificates has ca.pem, cert.pem and key.pem, as `hecaton pki issue` \
         makes it", .path.display()
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// A file is not PEM, or has nothing of the kind in it.
    #[error("{} has no {what} in it", .path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// The missing item.
        what: &'static str,
    },
    /// Others may read the key.
    #[error(
        "{path} can be read by other users (mode {mode:o}); run `chmod 600 {path}`, and issue \
         another one if they may have done so",
        path = .path.display()
    )]
    Open {
        /// The key.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The certificate does not name its holder.
    #[error("{}", .path.display())]
    Identity {
        /// The certificate.
        path: PathBuf,
        /// Error of the certificate's encoding or subject.
        source: IdentityError,
    },
    /// The certificate is over.
    #[error("{} has expired; issue another one with `hecaton pki issue {name} --renew`", .path.display())]
    Expired {
        /// The certificate.
        path: PathBuf,
        /// Name of the holder.
        name: String,
    },
    /// The files do not fit each other.
    #[error("what is in {} cannot be used together", .dir.display())]
    Unfit {
        /// The directory.
        dir: PathBuf,
        /// The mismatch.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Contents of the files at one moment.
pub struct Loaded {
    /// Differs from that of what was read before.
    pub generation: u64,
    /// Holder of the certificate.
    pub identity: Identity,
    /// For connections to a manager.
    pub client: Arc<ClientConfig>,
    /// For a manager, and for whoever serves volumes.
    pub server: Arc<ServerConfig>,
    /// For a node that borrows from another one.
    pub borrower: Arc<ClientConfig>,
    /// For a node that lends to others.
    pub lender: Arc<ServerConfig>,
    verifier: Arc<dyn ClientCertVerifier>,
    own: CertificateDer<'static>,
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nothing secret.
        f.debug_struct("Loaded")
            .field("generation", &self.generation)
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

impl Loaded {
    /// Whether a client's certificate is good at this moment.
    pub fn verify_client(&self, chain: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
        let (own, between) = chain.split_first().ok_or(rustls::Error::NoCertificatesPresented)?;
        self.verifier.verify_client_cert(own, between, UnixTime::now()).map(drop)
    }

    /// Whether the own certificate is for that host, a name or an address, as its clients see it.
    pub fn is_for(&self, host: &str) -> bool {
        match (ParsedCertificate::try_from(&self.own), ServerName::try_from(host)) {
            (Ok(own), Ok(host)) => verify_server_name(&own, &host).is_ok(),
            _ => false,
        }
    }
}

/// A directory of credentials.
#[derive(Debug)]
pub struct Credentials(Watched<Loaded>);

impl Credentials {
    /// Reads what is in `dir`.
    pub fn open(dir: &Path) -> Result<Credentials, CredentialsError> {
        Watched::open(dir, load).map(Credentials)
    }

    /// Where they are.
    pub fn dir(&self) -> &Path {
        self.0.dir()
    }

    /// The current contents. If changed files cannot be used, the previous contents stay: the log
    /// says so once, and the files are read again when they next change.
    pub fn now(&self) -> Arc<Loaded> {
        self.0.now()
    }
}

/// A directory of credentials that is opened when it is first needed. Users of the directory go on
/// or retry while it cannot be used.
#[derive(Debug)]
pub struct CredentialsDir {
    dir: PathBuf,
    opened: Mutex<Option<Arc<Credentials>>>,
}

impl CredentialsDir {
    /// Notes the directory and reads nothing yet.
    pub fn new(dir: PathBuf) -> CredentialsDir {
        CredentialsDir { dir, opened: Mutex::default() }
    }

    /// Opens the directory, unless an earlier call has.
    pub fn open(&self) -> Result<Arc<Credentials>, CredentialsError> {
        let mut opened = self.opened.lock().expect("no thread panics with it");
        if let Some(credentials) = &*opened {
            return Ok(Arc::clone(credentials));
        }
        let credentials = Arc::new(Credentials::open(&self.dir)?);
        Ok(Arc::clone(opened.insert(credentials)))
    }
}

/// Contents of a directory's files.
pub(crate) struct Files {
    dir: PathBuf,
    pub(crate) key: PrivateKeyDer<'static>,
    pub(crate) roots: Arc<RootCertStore>,
    /// The party's own certificate, and what lies between it and the authority.
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) revoked: Vec<CertificateRevocationListDer<'static>>,
}

impl Files {
    pub(crate) fn read(dir: &Path) -> Result<Files, CredentialsError> {
        let key_path = dir.join(KEY_FILE);
        let found = fs::metadata(&key_path)
            .map_err(|source| CredentialsError::Io { path: key_path.clone(), source })?;
        if found.mode() & 0o077 != 0 {
            return Err(CredentialsError::Open { path: key_path, mode: found.mode() & 0o7777 });
        }
        let keys: Vec<PrivateKeyDer<'static>> = read(&key_path)?;
        let key = keys.into_iter().next();
        let key = key.ok_or(CredentialsError::Empty { path: key_path, what: "private key" })?;
        let authorities: Vec<CertificateDer<'static>> = read(&dir.join(CA_FILE))?;
        let chain: Vec<CertificateDer<'static>> = read(&dir.join(CERTIFICATE_FILE))?;
        let revoked = match read(&dir.join(CRL_FILE)) {
            Err(CredentialsError::Io { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                Vec::new()
            }
            read => read?,
        };
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            let added = roots.add(authority);
            added.map_err(|error| unfit(dir, error.into()))?;
        }
        Ok(Files { dir: dir.to_owned(), key, roots: Arc::new(roots), chain, revoked })
    }

    /// The error for files that do not fit each other.
    pub(crate) fn unfit(&self, source: Unfit) -> CredentialsError {
        unfit(&self.dir, source)
    }
}

fn unfit(dir: &Path, source: Unfit) -> CredentialsError {
    CredentialsError::Unfit { dir: dir.to_owned(), source }
}

fn load(dir: &Path, generation: u64) -> Result<Loaded, CredentialsError> {
    let files = Files::read(dir)?;
    let path = dir.join(CERTIFICATE_FILE);
    let Some(own) = files.chain.first() else {
        return Err(CredentialsError::Empty { path, what: "certificate" });
    };
    let identity = Identity::of(own)
        .map_err(|source| CredentialsError::Identity { path: path.clone(), source })?;
    let over = X509Certificate::from_der(own)
        .is_ok_and(|(_, own)| own.validity().time_to_expiration().is_none());
    if over {
        return Err(CredentialsError::Expired { path, name: identity.name });
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let unfit = |source| files.unfit(source);
    let Files { roots, revoked, chain, key, .. } = &files;
    let (server, verifier) = server(roots, &provider, revoked, chain, key).map_err(unfit)?;
    let managers = ManagersOnly(servers(roots, &provider, revoked).map_err(unfit)?);
    let client = client(&provider, Arc::new(managers), &files).map_err(unfit)?;
    let (borrower, lender) = peers(&provider, &verifier, &files).map_err(unfit)?;
    let own = own.clone();
    Ok(Loaded { generation, identity, client, server, borrower, lender, verifier, own })
}

pub(crate) type Unfit = Box<dyn std::error::Error + Send + Sync>;

fn server(
    roots: &Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
    revoked: &[CertificateRevocationListDer<'static>],
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
) -> Result<(Arc<ServerConfig>, Arc<dyn ClientCertVerifier>), Unfit> {
    let builder =
        WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
    let builder = match revoked {
        [] => builder,
        lists => builder.with_crls(lists.iter().cloned()),
    };
    let verifier = builder.only_check_end_entity_revocation().build()?;
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::clone(&verifier))
        .with_single_cert(chain.to_vec(), key.clone_key())?;
    // As on the other side: what is resumed is not looked at again.
    config.send_tls13_tickets = 0;
    Ok((Arc::new(config), verifier))
}

/// Takes good certificates of servers if they are a manager's: those of other servers are good too.
#[derive(Debug)]
struct ManagersOnly(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for ManagersOnly {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self.0.verify_server_cert(own, between, host, ocsp_response, now)?;
        require(Role::Manager, own)?;
        Ok(verified)
    }

    signatures_of_the_first!();
}

/// Takes servers that an authority vouches for, and that are not revoked.
pub(crate) fn servers(
    roots: &Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
    revoked: &[CertificateRevocationListDer<'static>],
) -> Result<Arc<WebPkiServerVerifier>, Unfit> {
    let builder =
        WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
    let builder = match revoked {
        [] => builder,
        lists => builder.with_crls(lists.iter().cloned()),
    };
    Ok(builder.only_check_end_entity_revocation().build()?)
}

/// For whoever connects to those that `verifier` takes.
pub(crate) fn client(
    provider: &Arc<CryptoProvider>,
    verifier: Arc<dyn ServerCertVerifier>,
    files: &Files,
) -> Result<Arc<ClientConfig>, Unfit> {
    let mut config = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_auth_cert(files.chain.clone(), files.key.clone_key())?;
    // A resumed session would go on with what was revoked since.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// All objects of a kind in a PEM file.
fn read<T: PemObject>(path: &Path) -> Result<Vec<T>, CredentialsError> {
    let text =
        fs::read(path).map_err(|source| CredentialsError::Io { path: path.to_owned(), source })?;
    let objects: Result<Vec<T>, pem::Error> = T::pem_slice_iter(&text).collect();
    match objects {
        Ok(objects) if !objects.is_empty() => Ok(objects),
        _ => Err(CredentialsError::Empty { path: path.to_owned(), what: "PEM of its kind" }),
    }
}
