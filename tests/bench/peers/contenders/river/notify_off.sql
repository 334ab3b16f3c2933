drop trigger if exists tell on job;
