//! PostgreSQL's settings for a while.

use pgrx::prelude::*;
use std::ffi::CStr;

/// Settings that hold while it lives, whatever the session's are; an abort puts them back, too. They are a level of their own, which begins and ends within one
/// subtransaction and within the levels around it.
pub struct Settings(i32);

impl Settings {
    /// Sets them.
    pub fn set(values: &[(&CStr, &CStr)]) -> Self {
        // SAFETY: PostgreSQL's own pair, as functions with SET clauses use it; C strings.
        unsafe {
            let level = pg_sys::NewGUCNestLevel();
            for (name, value) in values {
                pg_sys::set_config_option(
                    name.as_ptr(),
                    value.as_ptr(),
                    pg_sys::GucContext::PGC_SUSET,
                    pg_sys::GucSource::PGC_S_SESSION,
                    pg_sys::GucAction::GUC_ACTION_SAVE,
                    true,
                    0,
                    false,
                );
            }
            Settings(level)
        }
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: ends the level that `set` began.
            unsafe { pg_sys::AtEOXact_GUC(true, self.0) };
        }
    }
}
