//! A donor's RAM: a memfd, mapped, committed as written.
