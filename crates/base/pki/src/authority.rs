//! A certificate authority in a directory, for clusters that have none.
//!
//! | file | what |
//! |---|---|
//! | `ca.pem`, `ca-key.pem` | the authority's certificate and key |
//! | `crl.pem` | what it has revoked |
//! | `index` | a line for each certificate ever issued: serial, end (Unix seconds), role, name |
//! | `tokens` | what those with a token may have, if there are any ([`grants`](crate::grants)) |
//! | `issued/NAME/` | what NAME needs: `ca.pem`, `cert.pem`, `key.pem`, `crl.pem` |
//!
//! A client's directory also has links for the file names that QEMU and libnbd expect. The index
//! line is written before its certificate, so every existing certificate can be revoked.

mod lock;

use self::lock::Lock;
use crate::grants::{Admission, GrantError, Grants, MAX_TOKENS};
use crate::identity::{Identity, Role};
use crate::token::{Token, hex, unhex};
use crate::trust::credentials::{CA_FILE, CERTIFICATE_FILE, CRL_FILE, KEY_FILE};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateRevocationListParams,
    CertificateSigningRequestParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData, RevocationReason,
    RevokedCertParams, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName,
};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use time::{Duration, OffsetDateTime};
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

const AUTHORITY_KEY: &str = "ca-key.pem";
const INDEX: &str = "index";
const ISSUED: &str = "issued";
const TOKENS: &str = "tokens";

/// The name that the authority itself answers to, which is no host's.
pub(crate) const OWN_NAME: &str = "authority.hecaton.invalid";

/// How long it answers with one certificate.
const OWN_LIFE: Duration = Duration::hours(1);

/// The names by which clients of network block devices look for a client's files in a directory.
const NAMES_OF_CLIENTS: [(&str, &str); 3] =
    [("ca-cert.pem", CA_FILE), ("client-cert.pem", CERTIFICATE_FILE), ("client-key.pem", KEY_FILE)];

/// How long the authority itself is good for.
const AUTHORITY_DAYS: i64 = 3650;

/// Certificates begin a little before they are made: clocks differ.
const CLOCK_DIFFERENCE: Duration = Duration::minutes(10);

/// Bytes of a serial number.
const SERIAL_BYTES: usize = 16;

/// Why nothing is issued or revoked.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// There is one.
    #[error("there is an authority in {}; choose another directory with --dir", .0.display())]
    Exists(PathBuf),
    /// There is none.
    #[error("there is no authority in {}; make one with `hecaton pki init`", .0.display())]
    Missing(PathBuf),
    /// Another command works on it.
    #[error("the authority in {} is in use by another command; try again", .0.display())]
    InUse(PathBuf),
    /// The name has a certificate.
    #[error(
        "`{name}` has a certificate in {}; add --renew to make a new one in its place, or revoke \
         the old one first", .dir.display()
    )]
    Issued {
        /// Name of the certificate's holder.
        name: String,
        /// Where it is.
        dir: PathBuf,
    },
    /// The name has a certificate, and the token is not for that name.
    #[error(
        "`{0}` has a certificate; take another name, or a token that is for this one (`hecaton pki token --name`)"
    )]
    NameTaken(String),
    /// The token gives nothing.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// There are too many tokens.
    #[error("there are {MAX_TOKENS} tokens that are good; withdraw them with --withdraw, or wait")]
    TooManyTokens,
    /// The certificate request cannot be parsed.
    #[error("what is to be certified cannot be read: {0}")]
    Request(rcgen::Error),
    /// Nothing was issued to that name, or all of it is revoked or over.
    #[error("`{0}` has no certificate of this authority that could be revoked")]
    Unknown(String),
    /// A host is neither a DNS name nor an address.
    #[error("`{0}` is neither a host's name nor its address")]
    Host(String),
    /// The end is beyond the authority's own, or no date.
    #[error("{0} days are more than the authority is good for itself")]
    TooLong(u32),
    /// A file is not what it should be.
    #[error("{} is damaged: {reason}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Description of the damage.
        reason: String,
    },
    /// The kernel refuses.
    #[error("cannot use {}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// Something cannot be signed.
    #[error("cannot sign")]
    Sign(#[from] rcgen::Error),
}

/// Contents of a certificate to issue.
#[derive(Clone, Debug)]
pub struct Wish {
    /// The holder. The name becomes part of a path: the caller must check it first.
    pub identity: Identity,
    /// Where a manager is reached: names and addresses.
    pub hosts: Vec<String>,
    /// How long it is good for.
    pub days: u32,
    /// Takes the place of one that there is.
    pub renew: bool,
}

/// An issued certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// The directory to give to the party.
    pub dir: PathBuf,
    /// When it ends, in seconds since 1970.
    pub ends_unix_s: i64,
}

/// Rights of a token to issue.
#[derive(Clone, Debug)]
pub struct TokenWish {
    /// Where the authority is asked: a host and a port.
    pub at: String,
    /// The only node that may use the token, even if it has a certificate already. `None`: any node
    /// whose name has no valid certificate.
    pub name: Option<String>,
    /// How many nodes may.
    pub uses: u32,
    /// How long it is good.
    pub hours: u32,
}

/// Files for a node that joins, as PEM.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Admitted {
    pub(crate) certificate: String,
    pub(crate) authority: String,
    pub(crate) revoked: String,
}

/// A line of the index.
struct Line {
    serial: Vec<u8>,
    ends_unix_s: i64,
    identity: Identity,
}

/// An authority, locked for this process.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    /// Holds the lock.
    _lock: Lock,
}

impl Authority {
    /// Makes one in `dir`, which is made if it is not there.
    pub fn init(dir: &Path) -> Result<Authority, AuthorityError> {
        make_dir(dir)?;
        let authority = Authority::lock(dir)?;
        if authority.path(CA_FILE).exists() || authority.path(AUTHORITY_KEY).exists() {
            return Err(AuthorityError::Exists(dir.to_owned()));
        }
        let key = KeyPair::generate()?;
        let now = OffsetDateTime::now_utc();
        let serial = serial()?;
        // Equal names would confuse two authorities until a signature does not match.
        let number: String = hex(&serial.to_bytes()[..4]);
        let mut params = subject(&format!("Hecaton authority {number}"), None);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_before = now - CLOCK_DIFFERENCE;
        params.not_after = now + Duration::days(AUTHORITY_DAYS);
        params.serial_number = Some(serial);
        let certificate = params.self_signed(&key)?;
        authority.write(AUTHORITY_KEY, &key.serialize_pem())?;
        authority.write(INDEX, "")?;
        authority.write_revoked(&Issuer::new(params, &key), Vec::new(), 1)?;
        // Last: with it the authority is there.
        authority.write(CA_FILE, &certificate.pem())?;
        Ok(authority)
    }

    /// The one in `dir`.
    pub fn open(dir: &Path) -> Result<Authority, AuthorityError> {
        if !dir.join(CA_FILE).is_file() {
            return Err(AuthorityError::Missing(dir.to_owned()));
        }
        Authority::lock(dir)
    }

    /// Issues a certificate and its key, into a directory of their own.
    pub fn issue(&self, wish: &Wish) -> Result<Issued, AuthorityError> {
        let Wish { identity, hosts, days, renew } = wish;
        let dir = self.path(ISSUED).join(&identity.name);
        if dir.exists() && !renew {
            return Err(AuthorityError::Issued { name: identity.name.clone(), dir });
        }
        let key = KeyPair::generate()?;
        let (certificate, ends_unix_s) = self.certify(identity, hosts, *days, &key)?;
        make_dir(&dir)?;
        for shared in [CA_FILE, CRL_FILE] {
            let text = self.read(shared)?;
            replace(&dir.join(shared), &text)?;
        }
        // A reader between the two writes finds a key that does not match, and reads again.
        replace(&dir.join(KEY_FILE), &key.serialize_pem())?;
        replace(&dir.join(CERTIFICATE_FILE), &certificate.pem())?;
        if identity.role == Role::Client {
            for (name, file) in NAMES_OF_CLIENTS {
                let link = dir.join(name);
                match std::os::unix::fs::symlink(file, &link) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                        return Err(io_error(&link, error));
                    }
                    _ => {}
                }
            }
        }
        Ok(Issued { dir, ends_unix_s })
    }

    /// Signs a certificate for a party's key, and notes that before. Says when it ends as well.
    fn certify(
        &self,
        identity: &Identity,
        hosts: &[String],
        days: u32,
        key: &impl PublicKeyData,
    ) -> Result<(Certificate, i64), AuthorityError> {
        let now = OffsetDateTime::now_utc();
        let mut params = subject(&identity.name, Some(identity.role));
        for host in hosts {
            if ServerName::try_from(host.as_str()).is_err() {
                return Err(AuthorityError::Host(host.clone()));
            }
            let named = CertificateParams::new(vec![host.clone()])?;
            params.subject_alt_names.extend(named.subject_alt_names);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![match identity.role {
            Role::Manager | Role::Export => ExtendedKeyUsagePurpose::ServerAuth,
            Role::Node | Role::Admin | Role::ReadOnly | Role::Client => {
                ExtendedKeyUsagePurpose::ClientAuth
            }
        }];
        params.not_before = now - CLOCK_DIFFERENCE;
        params.not_after = now + Duration::days(i64::from(days));
        if params.not_after > self.ends()? {
            return Err(AuthorityError::TooLong(days));
        }
        let serial = serial()?;
        params.serial_number = Some(serial.clone());
        params.use_authority_key_identifier_extension = true;
        let ends_unix_s = params.not_after.unix_timestamp();
        let certificate = params.signed_by(key, &self.issuer()?)?;
        self.note(&Line { serial: serial.to_bytes(), ends_unix_s, identity: identity.clone() })?;
        Ok((certificate, ends_unix_s))
    }

    /// Gives out a token.
    pub fn grant(&self, wish: &TokenWish) -> Result<Token, AuthorityError> {
        let now = OffsetDateTime::now_utc();
        let token = Token::draw(&self.certificate()?, &wish.at);
        let token = token.map_err(|_| rcgen::Error::RingUnspecified)?;
        let ends = now + Duration::hours(i64::from(wish.hours));
        let mut grants = self.grants()?;
        let (now, ends) = (now.unix_timestamp(), ends.unix_timestamp());
        if !grants.add(now, &token.secret(), ends, wish.uses, wish.name.clone()) {
            return Err(AuthorityError::TooManyTokens);
        }
        self.write(TOKENS, &grants.to_text())?;
        Ok(token)
    }

    /// Withdraws all tokens, and says how many of them could still be used.
    pub fn withdraw_tokens(&self) -> Result<usize, AuthorityError> {
        let mut grants = self.grants()?;
        let count = grants.withdraw(OffsetDateTime::now_utc().unix_timestamp());
        self.write(TOKENS, &grants.to_text())?;
        Ok(count)
    }

    /// Certifies a node's key for its token. Only the key counts in `request` (PKCS #10 as PEM).
    pub(crate) fn admit(
        &self,
        secret: &str,
        name: &str,
        request: &str,
        days: u32,
    ) -> Result<Admitted, AuthorityError> {
        let request =
            CertificateSigningRequestParams::from_pem(request).map_err(AuthorityError::Request)?;
        let key = &request.public_key;
        let mut grants = self.grants()?;
        let now = OffsetDateTime::now_utc().unix_timestamp();
        let admission = grants.use_up(now, secret, name, &key.subject_public_key_info())?;
        if admission == Admission::New && self.has_good_certificate(name, now)? {
            return Err(AuthorityError::NameTaken(name.to_owned()));
        }
        // Before the certificate exists: a token is rather used up for nothing than once more.
        self.write(TOKENS, &grants.to_text())?;
        let identity = Identity { name: name.to_owned(), role: Role::Node };
        let (certificate, _) = self.certify(&identity, &[], days, key)?;
        Ok(Admitted {
            certificate: certificate.pem(),
            authority: self.read(CA_FILE)?,
            revoked: self.read(CRL_FILE)?,
        })
    }

    /// Certificate chain and key for [`OWN_NAME`], by which token holders know the authority.
    pub(crate) fn own_face(
        &self,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), AuthorityError> {
        let now = OffsetDateTime::now_utc();
        let mut params = CertificateParams::new(vec![OWN_NAME.to_owned()])?;
        params.distinguished_name = subject(OWN_NAME, None).distinguished_name;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        (params.not_before, params.not_after) = (now - CLOCK_DIFFERENCE, now + OWN_LIFE);
        params.serial_number = Some(serial()?);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer()?)?;
        let chain = vec![certificate.der().clone(), self.certificate()?];
        Ok((chain, PrivatePkcs8KeyDer::from(key.serialize_der()).into()))
    }

    fn has_good_certificate(&self, name: &str, now_unix_s: i64) -> Result<bool, AuthorityError> {
        let (_, revoked) = self.revoked()?;
        let is_revoked =
            |line: &Line| revoked.iter().any(|entry| entry.serial_number.to_bytes() == line.serial);
        Ok(self.index()?.iter().any(|line| {
            line.identity.name == name && line.ends_unix_s > now_unix_s && !is_revoked(line)
        }))
    }

    fn grants(&self) -> Result<Grants, AuthorityError> {
        if !self.path(TOKENS).exists() {
            return Ok(Grants::default());
        }
        let unreadable = |line| self.damaged(TOKENS, format!("line {line} cannot be read"));
        Grants::parse(&self.read(TOKENS)?).map_err(unreadable)
    }

    /// The authority's own.
    fn certificate(&self) -> Result<CertificateDer<'static>, AuthorityError> {
        let read = CertificateDer::from_pem_file(self.path(CA_FILE));
        read.map_err(|error| self.damaged(CA_FILE, error))
    }

    /// Revokes all certificates of `name`, removes its directory, and returns their number.
    pub fn revoke(&self, name: &str) -> Result<usize, AuthorityError> {
        let now = OffsetDateTime::now_utc();
        let (number, mut revoked) = self.revoked()?;
        let mut count = 0;
        for line in self.index()? {
            let is_new = !revoked.iter().any(|entry| entry.serial_number.to_bytes() == line.serial);
            if line.identity.name == name && line.ends_unix_s > now.unix_timestamp() && is_new {
                count += 1;
                revoked.push(RevokedCertParams {
                    serial_number: SerialNumber::from_slice(&line.serial),
                    revocation_time: now,
                    reason_code: Some(RevocationReason::Unspecified),
                    invalidity_date: None,
                });
            }
        }
        if count == 0 {
            return Err(AuthorityError::Unknown(name.to_owned()));
        }
        self.write_revoked(&self.issuer()?, revoked, number + 1)?;
        let crl = self.read(CRL_FILE)?;
        let own = self.path(ISSUED).join(name);
        if own.exists() {
            fs::remove_dir_all(&own).map_err(|source| io_error(&own, source))?;
        }
        // Processes on this machine that use these directories see the new list at once.
        for dir in fs::read_dir(self.path(ISSUED)).into_iter().flatten().flatten() {
            replace(&dir.path().join(CRL_FILE), &crl)?;
        }
        Ok(count)
    }

    /// The list of what is revoked, for the managers.
    pub fn crl_file(&self) -> PathBuf {
        self.path(CRL_FILE)
    }

    fn lock(dir: &Path) -> Result<Authority, AuthorityError> {
        let lock = Lock::take(dir).map_err(|source| io_error(dir, source))?;
        let lock = lock.ok_or_else(|| AuthorityError::InUse(dir.to_owned()))?;
        Ok(Authority { dir: dir.to_owned(), _lock: lock })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn read(&self, name: &str) -> Result<String, AuthorityError> {
        let path = self.path(name);
        fs::read_to_string(&path).map_err(|source| io_error(&path, source))
    }

    fn write(&self, name: &str, text: &str) -> Result<(), AuthorityError> {
        replace(&self.path(name), text)
    }

    fn damaged(&self, name: &str, reason: impl ToString) -> AuthorityError {
        AuthorityError::Damaged { path: self.path(name), reason: reason.to_string() }
    }

    fn issuer(&self) -> Result<Issuer<'static, KeyPair>, AuthorityError> {
        let key = KeyPair::from_pem(&self.read(AUTHORITY_KEY)?)
            .map_err(|error| self.damaged(AUTHORITY_KEY, error))?;
        Issuer::from_ca_cert_pem(&self.read(CA_FILE)?, key)
            .map_err(|error| self.damaged(CA_FILE, error))
    }

    fn ends(&self) -> Result<OffsetDateTime, AuthorityError> {
        let der = self.certificate()?;
        let (_, certificate) =
            X509Certificate::from_der(&der).map_err(|error| self.damaged(CA_FILE, error))?;
        Ok(certificate.validity().not_after.to_datetime())
    }

    fn note(&self, line: &Line) -> Result<(), AuthorityError> {
        let path = self.path(INDEX);
        let Line { serial, ends_unix_s, identity } = line;
        let serial = hex(serial);
        let text = format!("{serial} {ends_unix_s} {} {}\n", identity.role, identity.name);
        let written = OpenOptions::new().append(true).open(&path).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        });
        written.map_err(|source| io_error(&path, source))
    }

    fn index(&self) -> Result<Vec<Line>, AuthorityError> {
        let text = self.read(INDEX)?;
        let parse = |(at, line)| {
            parse_line(line)
                .ok_or_else(|| self.damaged(INDEX, format!("line {} cannot be read", at + 1)))
        };
        text.lines().enumerate().map(parse).collect()
    }

    /// The number of the last list, and what is on it.
    fn revoked(&self) -> Result<(u64, Vec<RevokedCertParams>), AuthorityError> {
        let path = self.path(CRL_FILE);
        let der = CertificateRevocationListDer::from_pem_file(&path)
            .map_err(|error| self.damaged(CRL_FILE, error))?;
        let (_, list) = CertificateRevocationList::from_der(&der)
            .map_err(|error| self.damaged(CRL_FILE, error))?;
        let number = list.crl_number().and_then(|number| u64::try_from(number).ok());
        let number = number.ok_or_else(|| self.damaged(CRL_FILE, "it has no number"))?;
        let revoked = list.iter_revoked_certificates().map(|entry| RevokedCertParams {
            serial_number: SerialNumber::from_slice(entry.raw_serial()),
            revocation_time: entry.revocation_date.to_datetime(),
            reason_code: Some(RevocationReason::Unspecified),
            invalidity_date: None,
        });
        Ok((number, revoked.collect()))
    }

    fn write_revoked(
        &self,
        issuer: &Issuer<'_, impl rcgen::SigningKey>,
        revoked_certs: Vec<RevokedCertParams>,
        number: u64,
    ) -> Result<(), AuthorityError> {
        let now = OffsetDateTime::now_utc();
        let list = CertificateRevocationListParams {
            this_update: now - CLOCK_DIFFERENCE,
            // A list does not go bad: it is good until there is another.
            next_update: now + Duration::days(AUTHORITY_DAYS),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        self.write(CRL_FILE, &list.signed_by(issuer)?.pem()?)
    }
}

fn parse_line(line: &str) -> Option<Line> {
    let mut words = line.split(' ');
    let serial = unhex(words.next()?)?;
    let ends_unix_s = words.next()?.parse().ok()?;
    let (role, name) = (words.next()?.parse().ok()?, words.next()?.to_owned());
    Some(Line { serial, ends_unix_s, identity: Identity { name, role } })
}

fn subject(name: &str, role: Option<Role>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(role) = role {
        params.distinguished_name.push(DnType::OrganizationalUnitName, role.name());
    }
    params
}

/// A serial number that nobody guesses, and that no other certificate has.
fn serial() -> Result<SerialNumber, AuthorityError> {
    let mut bytes = [0; SERIAL_BYTES];
    let provider = rustls::crypto::ring::default_provider();
    provider.secure_random.fill(&mut bytes).map_err(|_| rcgen::Error::RingUnspecified)?;
    // Positive, and with no leading zeros, so that it reads the same everywhere.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

pub(crate) fn make_dir(dir: &Path) -> Result<(), AuthorityError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|source| io_error(dir, source))
}

/// Puts a file in place whole; nobody but its owner may read it.
pub(crate) fn replace(path: &Path, text: &str) -> Result<(), AuthorityError> {
    let unfinished = path.with_extension("new");
    let written = (|| {
        match fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&unfinished)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, path)
    })();
    written.map_err(|source| io_error(path, source))
}

fn io_error(path: &Path, source: io::Error) -> AuthorityError {
    AuthorityError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::credentials::{Credentials, CredentialsError};
    use rustls::pki_types::PrivateKeyDer;
    use std::os::unix::fs::MetadataExt;

    fn authority() -> (tempfile::TempDir, Authority) {
        let scratch = tempfile::tempdir().expect("a directory");
        let authority = Authority::init(&scratch.path().join("pki")).expect("made");
        (scratch, authority)
    }

    fn wish(name: &str, role: Role) -> Wish {
        let hosts = match role {
            Role::Manager | Role::Export => vec!["127.0.0.1".to_owned(), "manager".to_owned()],
            _ => Vec::new(),
        };
        Wish { identity: Identity { name: name.to_owned(), role }, hosts, days: 30, renew: false }
    }

    /// The certificate chain that a party shows to a manager.
    fn chain(dir: &Path) -> Vec<CertificateDer<'static>> {
        vec![CertificateDer::from_pem_file(dir.join(CERTIFICATE_FILE)).expect("a certificate")]
    }

    #[test]
    fn keys_are_for_their_owner_only() {
        let (_scratch, authority) = authority();
        let issued = authority.issue(&wish("a", Role::Node)).expect("issued");
        for path in [authority.path(AUTHORITY_KEY), issued.dir.join(KEY_FILE)] {
            assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        }
        assert_eq!(fs::metadata(&issued.dir).expect("there").mode() & 0o777, 0o700);
        let key = issued.dir.join(KEY_FILE);
        let secret = PrivateKeyDer::from_pem_file(&key).expect("a key");
        let credentials = Credentials::open(&issued.dir).expect("opened");
        let shown = format!("{authority:?} {issued:?} {credentials:?}");
        // Its number, in PKCS #8.
        let number = format!("{:?}", &secret.secret_der()[36..68]);
        let number = number.trim_matches(['[', ']']);
        assert!(!shown.contains(number), "a key is in logs: {shown}");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o640);
        fs::set_permissions(&key, open).expect("set");
        let error = Credentials::open(&issued.dir).expect_err("refused");
        assert!(matches!(error, CredentialsError::Open { mode: 0o640, .. }), "{error:?}");
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn what_exists_is_not_overwritten() {
        let (scratch, authority) = authority();
        let dir = scratch.path().join("pki");
        authority.issue(&wish("a", Role::Node)).expect("issued");
        let again = authority.issue(&wish("a", Role::Node));
        assert!(matches!(again, Err(AuthorityError::Issued { .. })), "{again:?}");
        drop(authority);
        assert!(matches!(Authority::init(&dir), Err(AuthorityError::Exists(_))));
        let nowhere = Authority::open(scratch.path());
        assert!(matches!(nowhere, Err(AuthorityError::Missing(_))));
    }

    #[test]
    fn nothing_outlives_the_authority() {
        let (_scratch, authority) = authority();
        let long = Wish { days: AUTHORITY_DAYS as u32 + 1, ..wish("a", Role::Node) };
        assert!(matches!(authority.issue(&long), Err(AuthorityError::TooLong(_))));
        let nowhere = Wish { hosts: vec!["a b".to_owned()], ..wish("m", Role::Manager) };
        assert!(matches!(authority.issue(&nowhere), Err(AuthorityError::Host(_))));
    }

    #[test]
    fn all_certificates_of_a_name_are_revoked_and_no_others() {
        let (_scratch, authority) = authority();
        let manager = authority.issue(&wish("m", Role::Manager)).expect("issued").dir;
        let credentials = Credentials::open(&manager).expect("opened");
        let mut chains = Vec::new();
        for name in ["a", "b"] {
            let first = authority.issue(&wish(name, Role::Node)).expect("issued");
            chains.push((name, chain(&first.dir)));
            let renewed = Wish { renew: true, ..wish(name, Role::Node) };
            let second = authority.issue(&renewed).expect("issued");
            chains.push((name, chain(&second.dir)));
        }
        let good = |name: &str| {
            let loaded = credentials.now();
            let of = chains.iter().filter(|(of, _)| *of == name);
            of.map(|(_, chain)| loaded.verify_client(chain)).collect::<Vec<_>>()
        };
        assert_eq!([good("a"), good("b")], [[Ok(()), Ok(())], [Ok(()), Ok(())]]);
        assert_eq!(authority.revoke("a").expect("revoked"), 2);
        let revoked = rustls::Error::InvalidCertificate(rustls::CertificateError::Revoked);
        assert_eq!(good("a"), [Err(revoked.clone()), Err(revoked.clone())], "without a restart");
        assert_eq!(good("b"), [Ok(()), Ok(())]);
        assert!(matches!(authority.revoke("a"), Err(AuthorityError::Unknown(_))));
        // The name is free again, and what was revoked stays so when more is.
        authority.issue(&wish("a", Role::Node)).expect("issued");
        assert_eq!(authority.revoke("b").expect("revoked"), 2);
        assert_eq!(good("a"), [Err(revoked.clone()), Err(revoked)]);
    }

    #[test]
    fn strangers_managers_and_what_is_over_are_no_clients() {
        use rustls::{CertificateError, Error};
        let (_scratch, authority) = authority();
        let (_other_scratch, other) = self::authority();
        let manager = authority.issue(&wish("m", Role::Manager)).expect("issued").dir;
        let loaded = Credentials::open(&manager).expect("opened").now();
        let stranger = other.issue(&wish("a", Role::Admin)).expect("issued").dir;
        let found = loaded.verify_client(&chain(&stranger));
        assert_eq!(found, Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)));
        let found = loaded.verify_client(&chain(&manager));
        assert!(
            matches!(
                found,
                Err(Error::InvalidCertificate(CertificateError::InvalidPurposeContext { .. }))
            ),
            "{found:?}"
        );
        let over = Wish { days: 0, ..wish("late", Role::Admin) };
        let over = authority.issue(&over).expect("issued").dir;
        // It is good to the end of the second in which it was made.
        let expired = || {
            let found = loaded.verify_client(&chain(&over));
            let Err(Error::InvalidCertificate(CertificateError::ExpiredContext { .. })) = found
            else {
                return Err(format!("{found:?}"));
            };
            Ok(())
        };
        hecaton_testkit::wait_until_seen("the certificate is refused as expired", expired);
        let own = Credentials::open(&over).expect_err("refused").to_string();
        assert!(own.contains("has expired") && own.contains("late --renew"), "{own}");
    }

    #[test]
    fn no_other_server_is_taken_for_a_manager() {
        use rustls::{CertificateError, ClientConnection, Error, ServerConnection};
        let (_scratch, authority) = authority();
        let loaded = |name, role| {
            let dir = authority.issue(&wish(name, role)).expect("issued").dir;
            Credentials::open(&dir).expect("opened").now()
        };
        let node = loaded("a", Role::Node);
        let taken = |name, role| {
            let host = ServerName::try_from("127.0.0.1").expect("a name");
            let mut client = ClientConnection::new(node.client.clone(), host).expect("made");
            let server = loaded(name, role).server.clone();
            let mut server = ServerConnection::new(server).expect("made");
            while client.is_handshaking() || server.is_handshaking() {
                let mut wire = Vec::new();
                client.write_tls(&mut wire).expect("written");
                server.read_tls(&mut wire.as_slice()).expect("read");
                server.process_new_packets().expect("a good client");
                wire.clear();
                server.write_tls(&mut wire).expect("written");
                let mut wire = wire.as_slice();
                while !wire.is_empty() {
                    client.read_tls(&mut wire).expect("read");
                    client.process_new_packets()?;
                }
            }
            Ok(())
        };
        assert_eq!(taken("m", Role::Manager), Ok(()));
        let wrong = Error::InvalidCertificate(CertificateError::InvalidPurpose);
        assert_eq!(taken("e", Role::Export), Err(wrong));
    }

    #[test]
    fn a_clients_files_are_found_by_the_names_that_others_know() {
        let (_scratch, authority) = authority();
        for renew in [false, true] {
            let wish = Wish { renew, ..wish("c", Role::Client) };
            let dir = authority.issue(&wish).expect("issued").dir;
            for (name, file) in NAMES_OF_CLIENTS {
                let read = |name: &str| fs::read(dir.join(name)).expect("read");
                assert_eq!(read(name), read(file));
            }
        }
        let dir = authority.issue(&wish("a", Role::Node)).expect("issued").dir;
        assert!(!dir.join("client-key.pem").exists());
    }

    #[test]
    fn files_that_do_not_fit_change_nothing_until_they_do() {
        let (_scratch, authority) = authority();
        let dir = authority.issue(&wish("a", Role::Node)).expect("issued").dir;
        let credentials = Credentials::open(&dir).expect("opened");
        let (first, key) = (chain(&dir), fs::read(dir.join(KEY_FILE)).expect("read"));
        authority.issue(&Wish { renew: true, ..wish("a", Role::Node) }).expect("issued");
        let new_key = fs::read_to_string(dir.join(KEY_FILE)).expect("read");
        fs::write(dir.join(KEY_FILE), &key).expect("written");
        assert_eq!(credentials.now().generation, 0, "a key of another certificate");
        replace(&dir.join(KEY_FILE), &new_key).expect("written");
        assert_eq!(credentials.now().generation, 1);
        assert_ne!(chain(&dir), first);
        fs::remove_file(dir.join(CERTIFICATE_FILE)).expect("removed");
        assert_eq!(credentials.now().generation, 1);
    }

    #[test]
    fn a_damaged_index_is_named_with_its_line() {
        let (_scratch, authority) = authority();
        authority.issue(&wish("a", Role::Node)).expect("issued");
        let mut text = authority.read(INDEX).expect("read");
        text.push_str("rubbish\n");
        fs::write(authority.path(INDEX), text).expect("written");
        let error = authority.revoke("a").expect_err("refused").to_string();
        assert!(error.contains("index is damaged") && error.contains("line 2"), "{error}");
    }
}
