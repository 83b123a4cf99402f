//! Reads a party's name and role from its certificate.

use std::fmt;
use std::str::FromStr;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::AttributeTypeAndValue;

/// Role of a party in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Serves the control plane.
    Manager,
    /// Lends and borrows memory, and speaks only for itself.
    Node,
    /// Reads, and gives orders.
    Admin,
    /// Reads only.
    ReadOnly,
    /// Serves volumes to other hosts.
    Export,
    /// Uses volumes of other hosts.
    Client,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 6] =
        [Role::Manager, Role::Node, Role::Admin, Role::ReadOnly, Role::Export, Role::Client];

    /// The role's name, in certificates and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Role::Manager => "manager",
            Role::Node => "node",
            Role::Admin => "admin",
            Role::ReadOnly => "read-only",
            Role::Export => "export",
            Role::Client => "client",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Role, &'static str> {
        let found = Role::ALL.into_iter().find(|role| role.name() == text);
        found.ok_or("a role is manager, node, admin, read-only, export or client")
    }
}

/// A party's name and role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The party's name: for a node, its name in the cluster.
    pub name: String,
    /// The party's role.
    pub role: Role,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.role, self.name)
    }
}

/// Reason why a certificate gives no identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The bytes are no X.509 certificate.
    #[error("the certificate cannot be read")]
    Unreadable,
    /// The subject has no common name, several, or one that is not text.
    #[error("the certificate's subject has no single common name (CN)")]
    NoName,
    /// The subject has no unit, several, or one that is no role.
    #[error(
        "the certificate's subject has no single unit (OU) that is a role: manager, node, admin, \
         read-only, export or client"
    )]
    NoRole,
}

impl Identity {
    /// Reads the identity from a certificate (DER). Does not check whether to trust it.
    pub fn of(certificate: &[u8]) -> Result<Identity, IdentityError> {
        let (_, certificate) =
            X509Certificate::from_der(certificate).map_err(|_| IdentityError::Unreadable)?;
        let subject = certificate.subject();
        let name = single(subject.iter_common_name()).ok_or(IdentityError::NoName)?;
        let unit = single(subject.iter_organizational_unit()).ok_or(IdentityError::NoRole)?;
        let role = unit.parse().map_err(|_| IdentityError::NoRole)?;
        Ok(Identity { name: name.to_owned(), role })
    }
}

fn single<'a>(
    mut attributes: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>,
) -> Option<&'a str> {
    let first = attributes.next()?.as_str().ok()?;
    attributes.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair};

    fn certificate(attributes: &[(DnType, &str)]) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, value) in attributes {
            params.distinguished_name.push(kind.clone(), *value);
        }
        let key = KeyPair::generate().expect("a key");
        params.self_signed(&key).expect("signed").der().to_vec()
    }

    #[test]
    fn the_subject_names_party_and_role() {
        let (cn, ou) = (DnType::CommonName, DnType::OrganizationalUnitName);
        for role in Role::ALL {
            assert_eq!(role.name().parse(), Ok(role));
            let der = certificate(&[(cn.clone(), "a"), (ou.clone(), role.name())]);
            assert_eq!(Identity::of(&der), Ok(Identity { name: "a".to_owned(), role }));
        }
        let of = |attributes: &[(DnType, &str)]| Identity::of(&certificate(attributes));
        assert_eq!(of(&[(cn.clone(), "a")]), Err(IdentityError::NoRole));
        assert_eq!(of(&[(cn, "a"), (ou.clone(), "root")]), Err(IdentityError::NoRole));
        assert_eq!(of(&[(ou, "admin")]), Err(IdentityError::NoName));
        assert_eq!(Identity::of(b"nothing"), Err(IdentityError::Unreadable));
    }
}
