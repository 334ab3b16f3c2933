//! What a function that `RETURNS TABLE` hands back: all its rows at once, in the tuple store that PostgreSQL would gather them in anyway. Handing them over one at a
//! time costs a call of the function each, with its settings, and a search for the type of its rows at every statement.

use crate::errors;
use pgrx::callconv::RetAbi;
use pgrx::pgrx_sql_entity_graph::metadata::{ArgumentError, ReturnsError, ReturnsRef, SqlMappingRef, SqlTranslatable, TypeOrigin};
use pgrx::prelude::*;

/// A row of an answer: its columns as PostgreSQL holds them.
pub trait Cells {
    /// Puts them into places for as many.
    fn fill(self, values: &mut [pg_sys::Datum], nulls: &mut [bool]);
}

/// For tuples, each as long as one of the functions' results.
macro_rules! cells {
    ($($column:ident)+) => {
        impl<$($column: IntoDatum),+> Cells for ($($column,)+) {
            #[allow(non_snake_case, reason = "a column is called like its type")]
            fn fill(self, values: &mut [pg_sys::Datum], nulls: &mut [bool]) {
                let ($($column,)+) = self;
                for ((value, null), cell) in values.iter_mut().zip(nulls).zip([$($column.into_datum()),+]) {
                    (*value, *null) = (cell.unwrap_or(pg_sys::Datum::from(0usize)), cell.is_none());
                }
            }
        }
    };
}
cells!(A B C);
cells!(A B C D);
cells!(A B C D E);
cells!(A B C D E F);
cells!(A B C D E F G H I J K L);
cells!(A B C D E F G H I J K L M N O P);

/// The most columns an answer has.
const WIDEST: usize = 16;

/// The rows of a function's answer.
pub struct Table<R>(Vec<R>);

impl<R> Table<R> {
    /// These rows, in this order.
    pub fn of(rows: Vec<R>) -> Self {
        Table(rows)
    }

    /// One row.
    pub fn one(row: R) -> Self {
        Table(vec![row])
    }
}

// SAFETY: the rows go into a tuple store of the query's, as the caller said it takes them, and the function itself returns nothing.
unsafe impl<R: Cells> RetAbi for Table<R> {
    type Item = R;
    type Ret = Self;

    fn to_ret(self) -> Self::Ret {
        self
    }

    unsafe fn box_ret_in_fcinfo(fcinfo: pg_sys::FunctionCallInfo, ret: Self::Ret) -> pg_sys::Datum {
        // SAFETY: PostgreSQL's own protocol of the materialize mode. Its node says what it is; the store lives as long as the query.
        unsafe {
            let info = (*fcinfo).resultinfo.cast::<pg_sys::ReturnSetInfo>();
            let takes_all = pg_sys::SetFunctionReturnMode::SFRM_Materialize as i32;
            if info.is_null() || (*info).type_ != pg_sys::NodeTag::T_ReturnSetInfo || (*info).allowedModes & takes_all == 0 {
                errors::internal("a function that returns rows was called where none are taken");
            }
            let mut rows = (*info).expectedDesc;
            if rows.is_null() {
                pg_sys::get_call_result_type(fcinfo, std::ptr::null_mut(), &mut rows);
            }
            let caller = pg_sys::MemoryContextSwitchTo((*(*info).econtext).ecxt_per_query_memory);
            let random_access = (*info).allowedModes & pg_sys::SetFunctionReturnMode::SFRM_Materialize_Random as i32 != 0;
            let store = pg_sys::tuplestore_begin_heap(random_access, false, pg_sys::work_mem);
            pg_sys::MemoryContextSwitchTo(caller);
            let (mut values, mut nulls) = ([pg_sys::Datum::from(0usize); WIDEST], [true; WIDEST]);
            for row in ret.0 {
                row.fill(&mut values, &mut nulls);
                pg_sys::tuplestore_putvalues(store, rows, values.as_mut_ptr(), nulls.as_mut_ptr());
            }
            (*info).returnMode = pg_sys::SetFunctionReturnMode::SFRM_Materialize;
            (*info).setResult = store;
            (*fcinfo).isnull = true;
            pg_sys::Datum::from(0usize)
        }
    }

    unsafe fn move_into_fcinfo_fcx(self, _fcinfo: pg_sys::FunctionCallInfo) {}

    unsafe fn fill_fcinfo_fcx(&self, _fcinfo: pg_sys::FunctionCallInfo) {}
}

// SAFETY: the declaration is written by hand in `sql/`; nothing is made of this.
unsafe impl<R> SqlTranslatable for Table<R> {
    const TYPE_IDENT: &'static str = "pg_stint::answer::Table";
    const TYPE_ORIGIN: TypeOrigin = TypeOrigin::External;
    const ARGUMENT_SQL: Result<SqlMappingRef, ArgumentError> = Err(ArgumentError::Table);
    const RETURN_SQL: Result<ReturnsRef, ReturnsError> = Ok(ReturnsRef::One(SqlMappingRef::literal("record")));
}
