//! TLS between nodes: who borrows memory and who lends it.
//!
//! Either end shows its node's certificate, and takes those of nodes only. A node's certificate is
//! one for a client, at both ends: were it one for a server, a node could pose as a server of
//! volumes to those who look at names and not at roles. Which node it is to be is for whoever
//! connects to look at, once hands are shaken.

use crate::identity::Role;
use crate::trust::by_role::{require, signatures_of_the_first};
use crate::trust::credentials::{Files, Unfit, client};
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{ClientConfig, DistinguishedName, Error, ServerConfig};
use std::sync::Arc;

/// Takes what another verifier takes of clients, if it is a node's.
#[derive(Debug)]
struct NodesOnly(Arc<dyn ClientCertVerifier>);

impl NodesOnly {
    fn verify(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.0.verify_client_cert(own, between, now)?;
        require(Role::Node, own)?;
        Ok(verified)
    }
}

impl ClientCertVerifier for NodesOnly {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify(own, between, now)
    }

    signatures_of_the_first!();
}

impl ServerCertVerifier for NodesOnly {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify(own, between, now).map(|_| ServerCertVerified::assertion())
    }

    signatures_of_the_first!();
}

/// For whoever borrows, and for whoever lends.
pub(crate) fn peers(
    provider: &Arc<CryptoProvider>,
    clients: &Arc<dyn ClientCertVerifier>,
    files: &Files,
) -> Result<(Arc<ClientConfig>, Arc<ServerConfig>), Unfit> {
    let nodes = Arc::new(NodesOnly(Arc::clone(clients)));
    let verifier: Arc<dyn ServerCertVerifier> = Arc::<NodesOnly>::clone(&nodes);
    let borrower = client(provider, verifier, files)?;
    let mut lender = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(nodes)
        .with_single_cert(files.chain.clone(), files.key.clone_key())?;
    // A resumed session skips the certificate check: send no tickets.
    lender.send_tls13_tickets = 0;
    Ok((borrower, Arc::new(lender)))
}
