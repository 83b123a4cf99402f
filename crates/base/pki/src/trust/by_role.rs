//! Verifiers that ask another one first and then want a role: what they have in common.

use crate::identity::{Identity, Role};
use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, Error};

/// Refuses a certificate of another role. That an authority vouches for it is seen elsewhere.
pub(crate) fn require(role: Role, own: &CertificateDer<'_>) -> Result<(), Error> {
    match Identity::of(own) {
        Ok(identity) if identity.role == role => Ok(()),
        _ => Err(CertificateError::InvalidPurpose.into()),
    }
}

/// The methods of a rustls verifier that are about signatures, as the first field has them.
macro_rules! signatures_of_the_first {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signature: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            self.0.verify_tls12_signature(message, certificate, signature)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signature: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            self.0.verify_tls13_signature(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            self.0.supported_verify_schemes()
        }
    };
}
pub(crate) use signatures_of_the_first;
